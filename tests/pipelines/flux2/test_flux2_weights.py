"""FLUX.2 from a folder in the layout of diffusers, and what can be wrong with one (cases C18, C19)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_flux2 import CPU, make_components

import pipelines.flux2.weights
from accel.errors import CheckpointError, ConfigError, DeviceMemoryError
from pipelines.flux2.config import flux2_config
from pipelines.flux2.schedule import flow_match_schedule
from pipelines.flux2.weights import Components, load_flux2
from pipelines.hub import HubId
from pipelines.weights_config import WeightsConfig

COMMIT = "c" * 40


@pytest.fixture(autouse=True)
def tiny_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are read as the tiny variants are, which differ in the layers that they read."""
    monkeypatch.setattr(
        pipelines.flux2.weights, "flux2_config", lambda name, size: flux2_config(name, "tiny")
    )


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Variant -> folder that diffusers itself wrote, the transformer in shards. Not to be written to."""
    folders: dict[str, Path] = {}

    def save(variant: str) -> Path:
        if variant not in folders:
            folder = tmp_path_factory.mktemp("flux2") / variant
            theirs = make_components(variant, torch.float32)[1]
            theirs.save_pretrained(folder)
            shutil.rmtree(folder / "transformer")
            theirs.transformer.save_pretrained(folder / "transformer", max_shard_size="100KB")
            folders[variant] = folder
        return folders[variant]

    return save


@pytest.fixture
def folder(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder of 4b to be spoiled."""
    return Path(shutil.copytree(saved("4b"), tmp_path / "klein"))


def load(path: Path, variant: str = "4b", *, dtype: torch.dtype = torch.float32) -> Components:
    weights = WeightsConfig(kind="local", path=str(path))
    return load_flux2(weights=weights, variant=variant, size="full", device=CPU, dtype=dtype)


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["4b", "4b-base", "dev"])
def test_folders_of_diffusers_load(saved: Callable[[str], Path], variant: str, dtype: torch.dtype) -> None:
    expected = make_components(variant, torch.float32)[0]
    loaded = load(saved(variant), variant, dtype=dtype)
    assert any((saved(variant) / "transformer").glob("*-of-*.safetensors"))
    for name in ("transformer", "vae", "text_encoder"):
        want, got = getattr(expected, name).state_dict(), getattr(loaded, name).state_dict()
        assert want.keys() == got.keys()
        for key, tensor in want.items():
            cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert torch.equal(got[key], cast), key
    assert loaded.text_encoder.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(
        loaded.tokenizer.encode("a cat").input_ids, expected.tokenizer.encode("a cat").input_ids
    )
    want_schedule, got_schedule = (
        flow_match_schedule(components.scheduler, steps=3, image_tokens=100)
        for components in (expected, loaded)
    )
    assert torch.equal(want_schedule.timesteps, got_schedule.timesteps)


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "transformer").glob("*-of-*.safetensors"))


def no_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


def other_pipeline(folder: Path) -> None:
    rewrite(folder / "model_index.json", _class_name="FluxPipeline")


def base_variant(folder: Path) -> None:
    rewrite(folder / "model_index.json", is_distilled=False)


def other_class(folder: Path) -> None:
    rewrite(folder / "model_index.json", vae=["diffusers", "AutoencoderKL"])


def other_class_inside(folder: Path) -> None:
    rewrite(folder / "vae" / "config.json", _class_name="AutoencoderKL")


def absent_component(folder: Path) -> None:
    rewrite(folder / "model_index.json", text_encoder=[None, None])


def absent_folder(folder: Path) -> None:
    shutil.rmtree(folder / "text_encoder")


def absent_config(folder: Path) -> None:
    (folder / "vae" / "config.json").unlink()


def absent_tokenizer_file(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def absent_chat_template(folder: Path) -> None:
    (folder / "tokenizer" / "chat_template.jinja").unlink()


def absent_shard(folder: Path) -> None:
    shards(folder)[1].unlink()


def cut_shard(folder: Path) -> None:
    shards(folder)[0].write_bytes(shards(folder)[0].read_bytes()[:-8])


def shard_outside(folder: Path) -> None:
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    rewrite(index, weight_map=weight_map | {next(iter(weight_map)): "../vae/model.safetensors"})


def pickle_alone(folder: Path) -> None:
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))


def other_text_width(folder: Path) -> None:
    rewrite(folder / "transformer" / "config.json", joint_attention_dim=64)


def other_latents(folder: Path) -> None:
    rewrite(folder / "vae" / "config.json", latent_channels=8)


def too_shallow(folder: Path) -> None:
    rewrite(folder / "text_encoder" / "config.json", num_hidden_layers=3, layer_types=None)


def wider_than_its_weights(folder: Path) -> None:
    rewrite(folder / "transformer" / "config.json", mlp_ratio=4.0)


def impossible_config(folder: Path) -> None:
    rewrite(folder / "transformer" / "config.json", num_attention_heads=-1)


def draws_noise(folder: Path) -> None:
    rewrite(folder / "scheduler" / "scheduler_config.json", stochastic_sampling=True)


def runs_backwards(folder: Path) -> None:
    rewrite(folder / "scheduler" / "scheduler_config.json", invert_sigmas=True)


def windowed(folder: Path) -> None:
    rewrite(folder / "text_encoder" / "config.json", layer_types=["sliding_attention"] * 4, sliding_window=64)


@dataclass(frozen=True)
class Fault:
    spoil: Callable[[Path], None]
    message: str


FAULTS = [
    Fault(no_index, r"no model_index\.json"),
    Fault(other_pipeline, "'FluxPipeline', this model needs Flux2KleinPipeline"),
    Fault(base_variant, "is not distilled, unlike model.variant=4b"),
    Fault(other_class, "'vae' is 'AutoencoderKL'"),
    Fault(other_class_inside, "is of the class 'AutoencoderKL'"),
    Fault(absent_component, "'text_encoder' is missing"),
    Fault(absent_folder, "'text_encoder' of model_index.json has no folder"),
    Fault(absent_config, r"vae/config\.json: can't be read"),
    Fault(absent_tokenizer_file, "no usable tokenizer"),
    Fault(absent_chat_template, "/tokenizer: the tokenizer has no chat template"),
    Fault(absent_shard, "is missing. The download may be incomplete"),
    Fault(cut_shard, "is cut short"),
    Fault(shard_outside, "lies outside the folder"),
    Fault(pickle_alone, "Pickle checkpoints are refused"),
    Fault(other_text_width, "joint_attention_dim differ: 96 and 64"),
    Fault(other_latents, "in_channels differ: 32 and 16"),
    Fault(too_shallow, "has 3 layers"),
    Fault(wider_than_its_weights, "do not fit"),
    Fault(impossible_config, "not a usable configuration"),
    Fault(draws_noise, 'draws noise.*Set "stochastic_sampling": false'),
    Fault(runs_backwards, 'runs backwards.*Set "invert_sigmas": false'),
    Fault(windowed, "sliding window"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.spoil.__name__)
def test_spoiled_folders_are_refused(folder: Path, fault: Fault) -> None:
    fault.spoil(folder)
    with pytest.raises(CheckpointError, match=fault.message):
        load(folder)


def test_another_language_model_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("dev"), tmp_path / "dev"))
    file = folder / "text_encoder" / "config.json"
    text = json.loads(file.read_text())["text_config"]
    rewrite(file, text_config=text | {"model_type": "llama"})
    with pytest.raises(CheckpointError, match="is a llama"):
        load(folder, "dev")


TEXT_WEIGHTS = Path("text_encoder/model.safetensors")


@pytest.mark.parametrize("variant", ["4b", "dev"])
@pytest.mark.parametrize("added", ["self_attn.q_proj.bias", "self_attn.q_proj.weight_scale"])
def test_tensors_in_layers_that_are_read_are_not_left_out(
    saved: Callable[[str], Path], tmp_path: Path, variant: str, added: str
) -> None:
    """The encoders have four layers; the last hidden state that is read is the input of layer 3."""
    folder = Path(shutil.copytree(saved(variant), tmp_path / "folder"))
    tensors = load_file(folder / TEXT_WEIGHTS)
    (layers,) = {name.partition("layers.")[0] for name in tensors if is_of_the_language_model(name)}
    for layer in (0, 2):
        name = f"{layers}layers.{layer}.{added}"
        save_file(tensors | {name: torch.ones(32)}, folder / TEXT_WEIGHTS)
        with pytest.raises(CheckpointError, match=f"1 unexpected tensors: {name}"):
            load(folder, variant)
    save_file(tensors | {f"{layers}layers.3.{added}": torch.ones(32)}, folder / TEXT_WEIGHTS)
    want = make_components(variant, torch.float32)[0].text_encoder.state_dict()
    assert all(
        torch.equal(tensor, want[name])
        for name, tensor in load(folder, variant).text_encoder.state_dict().items()
    )


def is_of_the_language_model(name: str) -> bool:
    return "layers." in name and "vision_tower" not in name


def test_files_beside_the_named_ones_are_not_read(folder: Path) -> None:
    """A stray whole file beside shards, another precision beside a single file."""
    for stray in ("transformer/diffusion_pytorch_model.safetensors", "vae/model.fp16.safetensors"):
        (folder / stray).write_bytes(b"neither read nor refused")
    want = make_components("4b", torch.float32)[0].transformer.state_dict()
    got = load(folder).transformer.state_dict()
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())


def test_the_home_of_nobody_is_a_missing_folder() -> None:
    with pytest.raises(CheckpointError, match=r"~no-such-user/klein: no such folder"):
        load(Path("~no-such-user/klein"))


def test_a_size_is_refused_with_a_folder(folder: Path) -> None:
    weights = WeightsConfig(kind="local", path=str(folder))
    with pytest.raises(ConfigError, match="size=tiny is for weights=synthetic"):
        load_flux2(weights=weights, variant="4b", size="tiny", device=CPU, dtype=torch.float32)


def test_memory_is_checked_before_anything_is_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.device_memory.free_bytes", lambda device: 1000)
    with pytest.raises(DeviceMemoryError, match="transformer"):
        load(folder)


class FolderHub:
    """A hub that serves a local folder and keeps what it was asked for."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.asked: list[str] = []
        self._snapshot = cache / "snapshots" / COMMIT
        shutil.copytree(source, self._snapshot)

    def file(self, where: HubId) -> Path:
        self.asked.append(str(where))
        return self._snapshot / (where.part or "")

    def folder(self, where: HubId) -> Path:
        return self.file(where)


def test_every_component_comes_from_one_commit(folder: Path, tmp_path: Path) -> None:
    hub = FolderHub(folder, tmp_path / "cache")
    weights = WeightsConfig(kind="hub", repo="maker/klein", revision="main")
    loaded = load_flux2(weights=weights, variant="4b", size="full", device=CPU, dtype=torch.float32, hub=hub)
    first, *others = hub.asked
    assert first == "maker/klein:model_index.json@main"
    names = ("tokenizer", "scheduler", "transformer", "vae", "text_encoder")
    assert others == [f"maker/klein:{name}@{COMMIT}" for name in names]
    assert loaded.description.startswith("maker/klein@main, variant 4b")
