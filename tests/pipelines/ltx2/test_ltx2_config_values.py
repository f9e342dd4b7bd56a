"""Values of config.json that would end an LTX-2 request in a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from json_files import changed
from ltx2_harness import CPU, stock_pipeline, tiny_components

from accel.errors import CheckpointError
from pipelines.ltx2.components import load
from pipelines.weights_config import WeightsConfig


@pytest.fixture(scope="module", params=["2.0", "2.3"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A variant and what diffusers saves of it. Every test restores what it changes."""
    folder = tmp_path_factory.mktemp("ltx2")
    stock_pipeline(tiny_components(request.param), with_image=False).save_pretrained(folder)
    with changed(folder / "model_index.json", tokenizer=["transformers", "GemmaTokenizerFast"]):
        yield request.param, folder


def load_folder(folder: Path, variant: str) -> None:
    weights = WeightsConfig(kind="local", path=str(folder))
    load(weights=weights, variant=variant, size="full", dtype=torch.float32, device=CPU)


def refusal(folder: Path, variant: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_folder(folder, variant)
    return str(refused.value)


def config_file(folder: Path, component: str) -> Path:
    return folder / component / ("scheduler_config.json" if component == "scheduler" else "config.json")


@pytest.mark.parametrize(
    ("component", "key", "value", "expected"),
    [
        ("scheduler", "shift_terminal", "x", "float"),
        ("transformer", "vae_scale_factors", [8, 32], "tuple[int, int, int]"),
        ("transformer", "rope_theta", None, "float"),
        ("transformer", "norm_eps", None, "float"),
        ("transformer", "base_height", None, "int"),
        ("transformer", "timestep_scale_multiplier", None, "int"),
        ("connectors", "rope_theta", None, "float"),
        ("vae", "scaling_factor", None, "float"),
        ("audio_vae", "sample_rate", None, "int"),
        ("audio_vae", "mel_hop_length", None, "int"),
        ("audio_vae", "mel_bins", "x", "int | None"),
        ("vocoder", "output_sampling_rate", None, "int"),
    ],
)
def test_values_of_another_type_are_refused(
    saved: tuple[str, Path], component: str, key: str, value: object, expected: str
) -> None:
    variant, folder = saved
    file = config_file(folder, component)
    with changed(file, **{key: value}):
        message = refusal(folder, variant)
    assert message.startswith(f"{file}: '{key}' is {json.dumps(value)}, but ")
    assert f" takes {expected}. " in message


@pytest.mark.parametrize(
    ("component", "key", "value", "message"),
    [
        ("scheduler", "base_shift", None, "base_shift and max_shift are None and"),
        ("scheduler", "max_shift", None, "and None, for 1024 and 4096 tokens"),
        ("scheduler", "base_image_seq_len", 4096, "for 4096 and 4096 tokens"),
        ("transformer", "audio_patch_size", 2, "transformer.audio_patch_size is 2"),
        ("transformer", "audio_patch_size_t", 2, "transformer.audio_patch_size_t is 2"),
        ("transformer", "patch_size_t", 2, "transformer.patch_size_t is 2"),
        ("transformer", "audio_sampling_rate", 0, "transformer.audio_sampling_rate is 0"),
        ("transformer", "base_height", 0, "transformer.base_height is 0"),
        ("transformer", "timestep_scale_multiplier", 0, "transformer.timestep_scale_multiplier is 0"),
        ("connectors", "rope_theta", 0, "connectors.rope_theta is 0"),
        ("vae", "patch_size_t", 2, "vae.patch_size_t is 2"),
        ("vae", "decoder_inject_noise", True, "adds noise of its own"),
        ("vae", "scaling_factor", 0.0, "vae.scaling_factor is 0.0"),
        ("audio_vae", "sample_rate", 0, "audio_vae.sample_rate is 0"),
        ("audio_vae", "mel_hop_length", 0, "audio_vae.mel_hop_length is 0"),
        ("scheduler", "stochastic_sampling", True, 'draws noise. Set "stochastic_sampling": false'),
        ("scheduler", "invert_sigmas", True, 'runs backwards. Set "invert_sigmas": false'),
        ("audio_vae", "mel_bins", None, "audio_vae.mel_bins is None, which has to be above 0"),
        ("audio_vae", "mel_bins", 9, "audio_vae.mel_bins is 9, which has to be a multiple of 4"),
        ("audio_vae", "mel_bins", 9, "takes spectrograms of 16 channels, the audio VAE makes 2 of 9"),
        ("vocoder", "output_sampling_rate", 0, "vocoder.output_sampling_rate is 0"),
    ],
)
def test_values_that_no_request_can_use_are_refused(
    saved: tuple[str, Path], component: str, key: str, value: object, message: str
) -> None:
    variant, folder = saved
    with changed(config_file(folder, component), **{key: value}):
        assert message in refusal(folder, variant)


@pytest.mark.parametrize("window", [None, 0])
def test_a_sliding_layer_needs_a_window(saved: tuple[str, Path], window: int | None) -> None:
    variant, folder = saved
    file = config_file(folder, "text_encoder")
    text = json.loads(file.read_text())["text_config"]
    with changed(file, text_config=text | {"sliding_window": window}):
        message = refusal(folder, variant)
    assert message.startswith(f"{file}: text_config.sliding_window is {window}, ")


@pytest.mark.parametrize("saved", ["2.3"], indirect=True)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_mel_channels", 9, "vocoder.bwe_in_channels and bwe_out_channels are 16 and 2"),
        ("hop_length", 0, "second part makes 240 samples of a hop of 0"),
        ("window_length", 0, "vocoder.window_length is 0, filter_length 512"),
        ("output_sampling_rate", 44100, "from 16000 to 44100 Hz"),
    ],
)
def test_the_parts_of_a_vocoder_have_to_meet(
    saved: tuple[str, Path], key: str, value: int, message: str
) -> None:
    variant, folder = saved
    with changed(config_file(folder, "vocoder"), **{key: value}):
        assert message in refusal(folder, variant)


def test_a_vae_may_say_for_all_blocks_at_once_that_it_adds_no_noise(saved: tuple[str, Path]) -> None:
    variant, folder = saved
    with changed(config_file(folder, "vae"), decoder_inject_noise=False):
        load_folder(folder, variant)
