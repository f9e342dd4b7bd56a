"""Loading whole policies: synthetic in every variant, packages, and what is refused before loading."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel.errors import CheckpointError, ConfigError
from pipelines.checkpoint import open_checkpoint
from pipelines.flux3_action import weights as weights_module
from pipelines.flux3_action.package import VARIANTS
from pipelines.flux3_action.policy_config_parsing import parse_policy_config
from pipelines.flux3_action.synthetic import droid_config, fill_synthetic
from pipelines.flux3_action.text_encoder import tiny_text_config
from pipelines.flux3_action.tokenizer import build_tiny_tokenizer
from pipelines.flux3_action.transformer import ActionTransformer
from pipelines.flux3_action.video_vae_architecture import read_video_encoder_config
from pipelines.flux3_action.weights import load_components
from pipelines.hub import Hub, HubId
from pipelines.weights_config import WeightsConfig

GOLDEN = Path(__file__).parents[2] / "golden" / "flux3"
CPU = torch.device("cpu")
SYNTHETIC = WeightsConfig(kind="synthetic")


def load(weights=SYNTHETIC, variant="base", size="tiny", dtype=torch.bfloat16):
    return load_components(weights=weights, variant=variant, size=size, device=CPU, dtype=dtype)


def all_slots(components):
    modules = (components.transformer, components.vae, components.text_encoder)
    return [slots for module in modules for slots in module.checkpoint_slots().items()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_synthetic_variant(variant):
    components = load(variant=variant)
    config = components.config
    distilled = variant.startswith(("gd", "sd"))
    assert config.num_inference_steps == (1 if variant.startswith("sd") else 4)
    assert (config.guidance_scale, config.guidance_scale_action) == (1.0 if distilled else 4.0, 1.0)
    slots = components.transformer.checkpoint_slots()
    expected = torch.float8_e4m3fn if variant.endswith("fp8r") else torch.bfloat16
    assert slots["single_blocks.0.q_proj.weight"].dtype == expected
    assert all(slot.float().isfinite().all() for _, slot in all_slots(components))
    assert "mean nothing" in components.description


def test_unknown_variant_lists_the_choices():
    with pytest.raises(ConfigError, match="fp8r, gd, gd-fp8r, sd, sd-fp8r"):
        load(variant="FP8R")


def test_synthetic_weights_depend_on_seed_and_key_alone():
    first, again, other = (
        dict(all_slots(load(replace(SYNTHETIC, synthetic_seed=seed)))) for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    weight, sibling = "single_blocks.0.q_proj.weight", "single_blocks.1.q_proj.weight"
    assert not torch.equal(first[weight], other[weight])
    assert not torch.equal(first[weight], first[sibling])


def test_synthetic_fp8_rows_use_the_whole_range():
    slots = {"a.weight": torch.empty(8, 32).to(torch.float8_e4m3fn), "a.weight_scale": torch.empty(8)}
    fill_synthetic(slots, seed=0, prefix="")
    assert slots["a.weight"].float().abs().amax(dim=1).tolist() == [448.0] * 8
    assert (slots["a.weight"].float() * slots["a.weight_scale"][:, None]).std() == pytest.approx(
        32**-0.5, rel=0.2
    )


def test_a_policy_can_be_refused_before_anything_is_allocated(monkeypatch):
    def refuse(config):
        raise ConfigError(f"chunks of {config.chunk_size}")

    monkeypatch.setattr(weights_module, "_build", None)
    with pytest.raises(ConfigError, match="chunks of"):
        load_components(
            weights=SYNTHETIC, variant="base", size="tiny", device=CPU, dtype=torch.float32, check=refuse
        )


def test_synthetic_activations_stay_finite():
    components = load()
    caption = components.tokenizer.encode("lift the cube")
    with torch.inference_mode():
        prepared = components.text_encoder.prepare(caption.n_tokens, 80, device=CPU)
        context = components.text_encoder(caption.input_ids, *prepared)
        latent = components.vae.encode(torch.rand(1, 3, 1, 160, 192) * 2 - 1)
    assert context.shape == (1, 80, components.config.transformer.context_in_dim)
    assert 0.1 < context.float().std() < 10
    assert 0.1 < latent.float().std() < 10


def test_full_synthetic_policy_is_the_released_architecture():
    with torch.device("meta"):
        transformer = ActionTransformer(droid_config("full").transformer, dtype=torch.bfloat16)
    slots = transformer.checkpoint_slots()
    assert len(slots) == 451
    assert sum(slot.numel() for slot in slots.values()) == 6_947_058_944


def test_architecture_of_the_video_encoder_is_read_from_its_tensors(golden_case):
    config = read_video_encoder_config(open_checkpoint(GOLDEN / "vae.safetensors"))
    expected = golden_case("e2e_fp32_main")["vae_config"]
    assert config.embed_dim == expected["embed_dim"]
    assert list(config.num_heads) == expected["num_heads"]
    assert list(config.depths) == expected["enc_depths"]
    assert config.temporal == (False, False, True, True)


def test_other_file_is_not_a_video_encoder():
    with pytest.raises(CheckpointError, match="not a FLUX 3 video VAE"):
        read_video_encoder_config(open_checkpoint(GOLDEN / "text_encoder.safetensors"))


@pytest.fixture
def package(tmp_path):
    """The golden package and VAE, with a text encoder whose context is as wide as the policy takes."""
    root = tmp_path / "policy"
    shutil.copytree(GOLDEN / "package", root)
    shutil.copy(GOLDEN / "vae.safetensors", tmp_path)
    write_text_encoder(tmp_path / "text_encoder", hidden_size=20)
    for folder, name in ((root, "config.native.json"), (root / "variants/fp8r", "config.json")):
        edit_config(folder / name, text_encoder_id="../text_encoder", text_output_layers=[1, 2])
    return root


def write_text_encoder(folder: Path, *, hidden_size: int) -> None:
    tokenizer = build_tiny_tokenizer()
    config = tiny_text_config(vocabulary=tokenizer.vocabulary)
    config.hidden_size = hidden_size
    config.save_pretrained(folder)
    tokenizer._tokenizer.save_pretrained(folder)
    encoder = weights_module.CaptionEncoder(config, output_layers=(1, 2), dtype=torch.bfloat16)
    slots = encoder.checkpoint_slots()
    fill_synthetic(slots, seed=0, prefix="")
    save_file(
        {f"model.language_model.{name}": slot for name, slot in slots.items()}, folder / "model.safetensors"
    )


def edit_config(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    sign(path.parent, path.name)


def edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    sign(folder, "model.safetensors")


def sign(folder: Path, name: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def load_package(root: Path, variant: str = "base"):
    return load(WeightsConfig(kind="local", path=str(root)), variant, "full")


def test_package_loads_strictly(package, golden):
    components = load_package(package)
    slots = components.transformer.checkpoint_slots()
    expected = golden("package/model.safetensors")
    assert {f"dit.{name}" for name in slots} == expected.keys()
    assert all(torch.equal(slot, expected[f"dit.{name}"]) for name, slot in slots.items())
    latent_mean = components.vae.checkpoint_slots()["model.z_normalizer.running_mean"]
    assert torch.equal(latent_mean, golden("vae.safetensors")["model.z_normalizer.running_mean"].bfloat16())
    assert "checksums verified" in components.description


def test_fp8r_package_loads_strictly(package, golden):
    (package / "variants/vae.safetensors").symlink_to(GOLDEN / "vae.safetensors")
    shutil.copytree(package.parent / "text_encoder", package / "variants/text_encoder")
    slots = load_package(package, "fp8r").transformer.checkpoint_slots()
    expected = golden("package/variants/fp8r/model.safetensors")
    assert {f"dit.{name}" for name in slots} == expected.keys()
    for name, slot in slots.items():
        assert slot.dtype == expected[f"dit.{name}"].dtype
        assert torch.equal(slot.float(), expected[f"dit.{name}"].float())


def test_ids_of_a_variant_are_also_tried_beside_the_package_root(package):
    assert load_package(package, "fp8r").config.quantization == "fp8r"


def test_tensors_of_unused_content_streams_are_skipped(package, golden):
    edit_weights(package, lambda tensors: tensors.update({"dit.emb_in.image.weight": torch.zeros(64, 128)}))
    slots = load_package(package).transformer.checkpoint_slots()
    expected = golden("package/model.safetensors")
    assert {f"dit.{name}" for name in slots} == expected.keys()
    assert all(torch.equal(slot, expected[f"dit.{name}"]) for name, slot in slots.items())


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda t: t.pop("dit.txt_in.weight"), r"1 missing tensors: dit\.txt_in\.weight"),
        (
            lambda t: t.update({"dit.txt_in.bias": torch.zeros(64)}),
            r"1 unexpected tensors: dit\.txt_in\.bias",
        ),
        (lambda t: t.update({"dit.txt_in.weight": torch.zeros(64, 41)}), r"shape \[64, 41\]"),
    ],
)
def test_weights_of_another_architecture(package, edit, fault):
    edit_weights(package, edit)
    with pytest.raises(CheckpointError, match=fault):
        load_package(package)


def test_tensors_of_no_stream_at_all_are_not_skipped(package):
    extra = {"dit.adapter_blocks.image.weight": torch.zeros(4)}
    edit_weights(package, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"1 unexpected tensors: dit\.adapter_blocks\.image\.weight"):
        load_package(package)


def test_what_the_package_leaves_in_doubt_is_described(package):
    edit_config(package / "config.native.json", single_frame_encode=False)
    assert "single_frame_encode is false" in load_package(package).description


def test_video_encoder_with_other_latents(package, monkeypatch):
    wider = replace(read_video_encoder_config(open_checkpoint(GOLDEN / "vae.safetensors")), z_dim=128)
    monkeypatch.setattr(weights_module, "read_video_encoder_config", lambda checkpoint: wider)
    with pytest.raises(CheckpointError, match=r"vae\.safetensors.*128 latent channels, the policy takes 96"):
        load_package(package)


def test_tampered_weights(package):
    path = package / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="sha256"):
        load_package(package)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda t: t.update({"dit.txt_in.weight_scale": torch.ones(64).bfloat16()}), "must be float32"),
        (lambda t: t.pop("dit.txt_in.weight_scale"), r"missing tensors: dit\.txt_in\.weight_scale"),
        (
            lambda t: t.update({"dit.txt_in.weight": torch.zeros(64, 40).bfloat16()}),
            "torch.bfloat16, the model has",
        ),
    ],
)
def test_fp8_weights_and_scales_go_together(package, edit, fault):
    edit_weights(package / "variants/fp8r", edit)
    with pytest.raises(CheckpointError, match=fault):
        load_package(package, "fp8r")


def test_text_encoder_of_another_width(package):
    shutil.rmtree(package.parent / "text_encoder")
    write_text_encoder(package.parent / "text_encoder", hidden_size=32)
    with pytest.raises(CheckpointError, match="context of 64, the policy takes 40"):
        load_package(package)


def test_missing_encoders_are_named(package):
    edit_config(package / "config.native.json", video_vae_id="./gone.safetensors")
    with pytest.raises(CheckpointError, match=r"\./gone\.safetensors"):
        load_package(package)


def test_variant_that_the_package_lacks(package):
    with pytest.raises(CheckpointError, match=r"variants/gd: no such folder"):
        load_package(package, "gd")


def test_package_from_the_hub(package):
    class LocalHub(Hub):
        def folder(self, where, *, files):
            assert where == HubId("org/policy", "variants/fp8r", "v1")
            assert "model.safetensors" in files
            return package / where.part

    weights = WeightsConfig(kind="hub", repo="org/policy", revision="v1")
    components = load_components(
        weights=weights, variant="fp8r", size="full", device=CPU, dtype=torch.bfloat16, hub=LocalHub()
    )
    assert components.config.quantization == "fp8r"
    assert components.description.startswith("org/policy:variants/fp8r@v1")


@pytest.mark.parametrize(
    ("weights", "size", "fault"),
    [
        (WeightsConfig(kind="local"), "full", r"weights\.path is not set"),
        (WeightsConfig(kind="hub"), "full", r"weights\.repo is not set"),
        (WeightsConfig(kind="synthetic", path="x"), "tiny", r"weights\.path has no meaning"),
        (WeightsConfig(kind="synthetic", revision="v1"), "tiny", r"weights\.revision has no meaning"),
        (WeightsConfig(kind="synthetic", verify_checksums=False), "tiny", "verify_checksums.*local or hub"),
        (WeightsConfig(kind="local", path="x", revision="v1"), "full", r"weights\.revision.*weights=hub"),
        (WeightsConfig(kind="local", path="x", repo="o/n"), "full", r"weights\.repo has no meaning"),
        (WeightsConfig(kind="hub", repo="o/n", synthetic_seed=3), "full", r"weights\.synthetic_seed"),
        (WeightsConfig(kind="local", path="x"), "tiny", "size=tiny is for weights=synthetic"),
    ],
)
def test_contradicting_settings(weights, size, fault):
    with pytest.raises(ConfigError, match=fault):
        load(weights, size=size)


def test_nothing_is_allocated_when_it_does_not_fit(monkeypatch):
    sizes = {}
    monkeypatch.setattr(weights_module, "require_fits", lambda needed, device: sizes.update(needed) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(size="full")
    assert sizes["transformer"] == 2 * 6_947_058_944
    assert sizes["text_encoder"] >= 2 * 3_618_742_272


def test_droid_config_is_one_that_a_package_could_hold():
    native = {
        "action_modality": "action_prediction_droid",
        "action_dim": 8,
        "chunk_size": 32,
        "gripper_flip_dims": [-1],
        "guidance_scale": 4.0,
        "guidance_scale_action": 1.0,
        "sampler_shift": 5.0,
    }
    assert parse_policy_config(native) == droid_config("full")
