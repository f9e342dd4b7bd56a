"""Components from a folder in the layout of diffusers, and folders that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import LTX2Pipeline
from ltx2_harness import ALL_SAME, CPU, ours, outputs_of, same_outputs, stock_pipeline, tiny_components
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

from accel.errors import CheckpointError, ConfigError, DeviceMemoryError
from pipelines import device_memory
from pipelines.build import build
from pipelines.ltx2.architectures import PROMPT_LENGTH
from pipelines.ltx2.components import load
from pipelines.ltx2.prompt import PromptTokenizer
from pipelines.weights_config import WeightsConfig
from tasks.config import compose

REQUEST = ("model=ltx2", "accel=eager", "device=cpu", "model.steps=2", "model.height=64", "model.width=64",
           "model.frames=9", "model.stg_blocks=[1]")  # fmt: skip


@pytest.fixture(scope="module", params=["2.0", "2.3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A variant and what diffusers' `save_pretrained` makes of it."""
    return request.param, save(request.param, tmp_path_factory.mktemp("ltx2"))


def save(variant: str, folder: Path) -> Path:
    stock_pipeline(tiny_components(variant), with_image=False).save_pretrained(folder)
    edit(
        folder / "model_index.json",
        lambda index: index.update(tokenizer=["transformers", "GemmaTokenizerFast"]),
    )
    return folder


@pytest.fixture
def damaged(saved: tuple[str, Path], tmp_path: Path) -> tuple[str, Path]:
    """A copy to be spoilt."""
    variant, folder = saved
    return variant, Path(shutil.copytree(folder, tmp_path / "copy"))


def edit(file: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def load_folder(folder: Path, variant: str, *, two_stage: bool = False) -> None:
    weights = WeightsConfig(kind="local", path=str(folder))
    load(
        weights=weights,
        variant=variant,
        size="full",
        dtype=torch.float32,
        device=CPU,
        two_stage=two_stage,
    )


def test_a_saved_pipeline_gives_the_same_bits(saved: tuple[str, Path]) -> None:
    variant, folder = saved
    config = compose(*REQUEST, f"model.variant='{variant}'", "weights=local", f"weights.path={folder}")
    pipeline = build(config)
    request = pipeline.request_from(config)
    components = tiny_components(variant)
    tokenizer = PromptTokenizer(components.tokenizer._tokenizer, length=PROMPT_LENGTH)
    in_memory = ours(replace(components, tokenizer=tokenizer))
    assert pipeline.run(request).digests == in_memory.run(request).digests


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_saved_pipeline_has_the_bits_that_diffusers_loads(saved: tuple[str, Path], dtype: str) -> None:
    variant, folder = saved
    require_diffusers_bits(*REQUEST, f"model.variant='{variant}'", f"dtype={dtype}", folder=folder)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_distilled_folder_has_the_bits_that_diffusers_loads(tmp_path: Path, dtype: str) -> None:
    folder = save("2.0-distilled", tmp_path)
    distilled = ("model.variant=2.0-distilled", "model.steps=null", f"dtype={dtype}")
    require_diffusers_bits(*REQUEST, *distilled, folder=folder)


def require_diffusers_bits(*choice: str, folder: Path) -> None:
    config = compose(*choice, "weights=local", f"weights.path={folder}")
    pipeline = build(config)
    request = pipeline.request_from(config)
    components = pipeline._components
    expected = outputs_of(loaded_by_diffusers(folder, components.transformer.dtype), components, request)
    assert same_outputs(pipeline.run(request), expected, components) == ALL_SAME


def loaded_by_diffusers(folder: Path, dtype: torch.dtype) -> LTX2Pipeline:
    # The class that the index names would make the vocabulary of Gemma.
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipeline = LTX2Pipeline.from_pretrained(folder, dtype=dtype, tokenizer=tokenizer)
    pipeline.set_progress_bar_config(disable=True)
    # Weights that are mapped from a file begin at any address, where CPU kernels may round differently.
    for module in (part for part in pipeline.components.values() if isinstance(part, nn.Module)):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    return pipeline


@pytest.fixture
def with_upsampler(damaged: tuple[str, Path]) -> tuple[str, Path]:
    """With a folder `latent_upsampler` that `model_index.json` does not name, as in the release."""
    variant, folder = damaged
    tiny_components(variant, two_stage=True).latent_upsampler.save_pretrained(folder / "latent_upsampler")
    return variant, folder


def test_a_saved_upsampler_gives_the_same_bits(with_upsampler: tuple[str, Path]) -> None:
    variant, folder = with_upsampler
    two_stage = ("model.two_stage=true", "model.height=128", "model.width=128")
    weights = (f"model.variant='{variant}'", "weights=local", f"weights.path={folder}")
    config = compose(*REQUEST, *two_stage, *weights)
    pipeline = build(config)
    request = pipeline.request_from(config)
    components = tiny_components(variant, two_stage=True)
    tokenizer = PromptTokenizer(components.tokenizer._tokenizer, length=PROMPT_LENGTH)
    in_memory = ours(replace(components, tokenizer=tokenizer))
    assert pipeline.run(request).digests == in_memory.run(request).digests


def test_a_missing_upsampler_is_named_with_what_to_do(saved: tuple[str, Path]) -> None:
    variant, folder = saved
    with pytest.raises(CheckpointError) as refused:
        load_folder(folder, variant, two_stage=True)
    message = str(refused.value)
    assert f"{folder / 'latent_upsampler'}: no such folder, but model.two_stage=true needs it" in message
    assert f"Fetch 'latent_upsampler' of the release into {folder}" in message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temporal_upsample", True, "does not double height and width alone"),
        ("rational_spatial_scale", 1.5, "does not double height and width alone"),
        ("in_channels", 4, "takes 4 channels, the VAE has 8"),
    ],
)
def test_upsamplers_that_do_not_fit_are_refused(
    with_upsampler: tuple[str, Path], key: str, value: object, message: str
) -> None:
    variant, folder = with_upsampler
    edit(folder / "latent_upsampler" / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError, match=message):
        load_folder(folder, variant, two_stage=True)


def test_an_index_that_names_another_upsampler_is_refused(with_upsampler: tuple[str, Path]) -> None:
    variant, folder = with_upsampler
    edit(folder / "model_index.json", lambda index: index.update(latent_upsampler=["diffusers", "Other"]))
    with pytest.raises(CheckpointError, match="component 'latent_upsampler' is 'Other'"):
        load_folder(folder, variant, two_stage=True)


def test_another_variant_is_refused(saved: tuple[str, Path]) -> None:
    variant, folder = saved
    with pytest.raises(CheckpointError, match=r"set model\.variant to what they are"):
        load_folder(folder, {"2.0": "2.3", "2.3": "2.0"}[variant])


def test_a_folder_of_2_0_is_not_taken_for_a_distilled_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_folder(save("2.0", tmp_path), "2.0-distilled")
    assert "the scheduler moves the noise levels that 2.0-distilled was trained for" in str(refused.value)
    assert "set model.variant to what they are" in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [{"use_dynamic_shifting": True}, {"shift_terminal": 0.1}, {"shift": 3.0}, {"use_karras_sigmas": True}],
    ids=str,
)
def test_schedulers_that_move_distilled_noise_levels_are_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = save("2.0-distilled", tmp_path)
    edit(folder / "scheduler" / "scheduler_config.json", lambda config: config.update(change))
    with pytest.raises(CheckpointError, match="the scheduler moves the noise levels"):
        load_folder(folder, "2.0-distilled")


@pytest.mark.parametrize("name", ["transformer", "vae", "audio_vae", "connectors", "vocoder", "text_encoder",
                                  "tokenizer", "scheduler"])  # fmt: skip
def test_a_missing_component_is_named(damaged: tuple[str, Path], name: str) -> None:
    variant, folder = damaged
    edit(folder / "model_index.json", lambda index: index.pop(name))
    with pytest.raises(CheckpointError, match=f"component '{name}'"):
        load_folder(folder, variant)


@pytest.mark.parametrize("entry", ["LTX2Vocoder", ["LTX2Vocoder"], {"class": "LTX2Vocoder"}, 5], ids=str)
def test_a_vocoder_that_the_index_names_badly_is_refused(damaged: tuple[str, Path], entry: object) -> None:
    variant, folder = damaged
    edit(folder / "model_index.json", lambda index: index.update(vocoder=entry))
    with pytest.raises(CheckpointError, match="component 'vocoder' is None, expected LTX2Vocoder"):
        load_folder(folder, variant)


def test_a_folder_of_another_pipeline_is_refused(damaged: tuple[str, Path]) -> None:
    variant, folder = damaged
    edit(folder / "model_index.json", lambda index: index.update(_class_name="FluxPipeline"))
    with pytest.raises(CheckpointError, match="FluxPipeline"):
        load_folder(folder, variant)


@pytest.mark.parametrize(
    ("component", "key", "value", "message"),
    [
        ("vae", "timestep_conditioning", True, "adds noise of its own"),
        ("vae", "spatial_compression_ratio", 16, "makes a latent of 8 frames and 16 pixels a side"),
        ("transformer", "patch_size", 2, r"transformer\.patch_size is 2"),
        ("audio_vae", "mel_bins", 16, "audio channels"),
    ],
)
def test_components_that_do_not_fit_are_refused(
    damaged: tuple[str, Path], component: str, key: str, value: object, message: str
) -> None:
    variant, folder = damaged
    edit(folder / component / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError, match=message):
        load_folder(folder, variant)


def test_a_folder_that_does_not_exist_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_folder(tmp_path / "nope", "2.0")
    assert str(refused.value).startswith(f"{tmp_path / 'nope'}: no such folder. ")


def test_a_truncated_file_is_refused(damaged: tuple[str, Path]) -> None:
    variant, folder = damaged
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="transformer"):
        load_folder(folder, variant)


def test_a_missing_tensor_is_refused(damaged: tuple[str, Path]) -> None:
    variant, folder = damaged
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"proj_out\.weight"):
        load_folder(folder, variant)


def test_half_precision_files_load_as_asked(damaged: tuple[str, Path]) -> None:
    variant, folder = damaged
    file = folder / "connectors" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file)
    weights = WeightsConfig(kind="local", path=str(folder))
    components = load(weights=weights, variant=variant, size="full", dtype=torch.float32, device=CPU)
    assert {parameter.dtype for parameter in components.connectors.parameters()} == {torch.float32}


def test_tiny_is_for_synthetic_weights(saved: tuple[str, Path]) -> None:
    weights = WeightsConfig(kind="local", path=str(saved[1]))
    with pytest.raises(ConfigError, match="size=tiny"):
        load(weights=weights, variant=saved[0], size="tiny", dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("variant", ["2.0", "2.0-distilled", "2.3"])
def test_the_released_widths_are_refused_where_they_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 2**30)
    with pytest.raises(DeviceMemoryError) as refused:
        load(
            weights=WeightsConfig(kind="synthetic"),
            variant=variant,
            size="full",
            dtype=torch.bfloat16,
            device=CPU,
            stg_blocks=(28,),
        )
    # 18.88 and 18.99 billion parameters of two bytes (LTX-2 spec section 3).
    expected = {"2.3": 18.99}.get(variant, 18.88) * 2e9 / 2**30
    line = next(line for line in str(refused.value).splitlines() if "transformer" in line)
    assert float(line.split()[1]) == pytest.approx(expected, abs=0.02)
