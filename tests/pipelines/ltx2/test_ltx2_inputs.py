"""What a user gets wrong is refused by name before weights are loaded; what is cut short is said."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ltx2_harness import ours, tiny_components
from PIL import Image

from accel.errors import ConfigError, ObservationError, SamebitError
from pipelines.build import build
from pipelines.ltx2 import components
from pipelines.ltx2 import pipeline as ltx2_pipeline
from pipelines.ltx2.defaults import DISTILLED_SIGMAS
from pipelines.ltx2.guidance import UNGUIDED
from pipelines.ltx2.pipeline import NEGATIVE_WITHOUT_EFFECT, STG_WITHOUT_EFFECT
from pipelines.ltx2.request import RefinementPlan, VideoRequest, video_request
from pipelines.ltx2.settings import Ltx2Settings
from pipelines.ltx2.stages import TextEncoding
from pipelines.ltx2.text_encoder import attention_masks, rotary_tables
from stages.stage import State
from tasks.config import compose

BASE = ("model=ltx2", "accel=eager", "device=cpu", "size=tiny")


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(**options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(components, "load", load)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.height=853",
            "expected a multiple of 32, at least 64, got 853; the nearest are 832 and 864",
        ),
        ("model.width=32", "the nearest are 64 and 96"),
        ("model.upsampling_adain=0.5", "model.upsampling_adain: has no effect in one stage"),
        ("model.upsampling_tone_mapping=0.5", "use model.two_stage=true"),
        ("model.frames=72", "the nearest are 65 and 73"),
        ("model.frames=80001", "the largest is 4097"),
        ("model.frames=0", "model.frames"),
        ("model.variant=2.1", "model.variant"),
        ("model.steps=1", "use 2 or more"),
        ("model.guidance=-1", "model.guidance"),
        ("model.guidance_rescale=1.5", "model.guidance_rescale"),
        (
            "model.guidance_audio=0",
            "model.guidance_audio=0: below 1 it leads the other way beside model.guidance=3; 1.0 is off.",
        ),
        ("model.guidance=0.5", "below 1 it leads the other way beside model.guidance_audio=7; 1.0 is off."),
        ("model.stg_blocks=[]", "model.stg_blocks: is empty"),
        ("model.stg_blocks=[-1]", "model.stg_blocks"),
        ("model.fps=0", "model.fps"),
        ("model.fps=1e-9", "model.fps: expected a finite number of at least 1"),
        ("model.videos=0", "model.videos"),
        ("prompt=''", "prompt: is empty"),
        ("prompt=' '", "prompt: is empty"),
        ("prompt=null", "prompt: is empty"),
        ("model.attention_breaks=true", "use accel=segmented"),
        ("model.image=nowhere.png", "model.image: no file nowhere.png"),
        ("model.imgae=x.png", "imgae"),
    ],
)
def test_refused_before_loading(override: str, message: str) -> None:
    with pytest.raises(SamebitError) as refused:
        build(compose(*BASE, override))
    assert message in str(refused.value)


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.height=160",
            "expected a multiple of 64, at least 128 with model.two_stage, got 160; the nearest are 128",
        ),
        ("model.width=64", "the nearest are 128 and 192"),
        ("model.upsampling_adain=-0.5", "model.upsampling_adain"),
        ("model.upsampling_tone_mapping=1.5", "model.upsampling_tone_mapping"),
    ],
)
def test_refused_before_loading_in_two_stages(override: str, message: str) -> None:
    with pytest.raises(SamebitError) as refused:
        build(compose(*BASE, "model.two_stage=true", override))
    assert message in str(refused.value)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_the_distilled_variant_has_its_own_steps() -> None:
    with pytest.raises(ConfigError, match="has 8 steps"):
        build(compose(*BASE, "model.variant=2.0-distilled", "model.steps=30"))


def test_blocks_that_the_transformer_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.stg_blocks: no block 28; .* blocks 0 to 1"):
        build(compose(*BASE, "model.stg_blocks=[28]"))
    pipeline = ours(tiny_components())
    request = video_request("x", settings=Ltx2Settings(stg_blocks=(28,)), size="tiny")
    with pytest.raises(ConfigError, match="no block 28"):
        pipeline.run(request)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_missing_encoder_is_noticed_before_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ltx2_pipeline.require_av.__module__ + ".find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.save_as=mp4 needs PyAV"):
        build(compose(*BASE))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"model.image_crf=33 needs PyAV"):
        build(compose(*BASE, "model.save_as=frames", f"model.image={tmp_path / 'a.png'}"))


def test_a_long_prompt_is_cut_as_the_library_does_and_said() -> None:
    pipeline = ours(tiny_components())
    settings = Ltx2Settings(height=64, width=64, frames=9, steps=2, negative_prompt="no " * 100)
    result = pipeline.run(video_request("word " * 10_000, settings=settings, size="tiny"))
    cut = [note for note in result.notes if "longer than 128 tokens" in note]
    assert [note.partition(":")[0] for note in cut] == ["prompt", "model.negative_prompt"]


def notes(variant: str, **settings: Any) -> tuple[str, ...]:
    choice = Ltx2Settings(variant=variant, height=64, width=64, frames=9, **settings)
    pipeline = ours(tiny_components(variant))
    return pipeline.run(video_request("x", settings=choice, size="tiny")).notes


def test_what_has_no_effect_is_said() -> None:
    assert notes("2.0", steps=2) == (STG_WITHOUT_EFFECT,)
    assert notes("2.0", steps=2, stg=0.0, negative_prompt="dark") == ()
    assert notes("2.3", steps=2) == ()
    assert notes("2.0-distilled", negative_prompt="dark") == (NEGATIVE_WITHOUT_EFFECT,)


@pytest.mark.parametrize("fps", [100.0, float("inf")])
def test_clips_too_short_for_sound_are_refused(fps: float) -> None:
    settings = Ltx2Settings(height=64, width=64, frames=1, fps=fps, steps=2)
    with pytest.raises(ConfigError, match="fps"):
        ours(tiny_components()).run(video_request("x", settings=settings, size="tiny"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 70}, "model.height: expected a multiple of 32"),
        ({"width": 32}, "model.width: expected a multiple of 32, at least 64"),
        ({"frames": 10}, "model.frames: expected 8 n + 1, got 10"),
        ({"refinement": RefinementPlan()}, "model.height: expected a multiple of 64"),
        ({"prompt": ["a", "b"]}, "prompt="),
        ({"negative_prompt": None}, "negative_prompt="),
        ({"fps": 0.0}, "fps=0.0"),
        ({"fps": float("nan")}, "fps=nan"),
        ({"videos": 0}, "videos=0"),
        ({"videos": 65}, "videos=65 is out of range; use a whole number, 1 to 64"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"fps": True}, "fps=True"),
        ({"sigmas": ()}, "sigmas=()"),
        ({"sigmas": [1.0, 0.5]}, "sigmas=[1.0, 0.5] is out of range; use up to 1000 falling noise levels"),
        ({"sigmas": (1.0, float("nan"))}, "sigmas=(1.0, nan)"),
        ({"sigmas": (1.5, 0.5)}, "sigmas=(1.5, 0.5)"),
        ({"sigmas": (0.5, 1.0)}, "sigmas=(0.5, 1.0)"),
        ({"sigmas": (1.0, 0.5, 0.5)}, "sigmas=(1.0, 0.5, 0.5)"),
        ({"sigmas": (1.0, 0.0)}, "sigmas=(1.0, 0.0)"),
        ({"sigmas": (1.0,)}, "sigmas=(1.0,)"),
        ({"sigmas": (True, 0.5)}, "sigmas=(True, 0.5)"),
        ({"guidance": 3.0}, "guidance=3.0"),
        ({"image": "a.png"}, "image=a.png is out of range; use a PIL image or None."),
        ({"image_crf": 52}, "image_crf=52"),
        ({"refinement": True}, "refinement=True"),
    ],
    ids=str,
)
def test_impossible_requests_are_refused(change: dict[str, Any], message: str) -> None:
    asked = video_request("x", settings=Ltx2Settings(height=64, width=64, frames=9), size="tiny")
    with pytest.raises(ConfigError) as refused:
        replace(asked, **change)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": float("nan")}, "text=nan is out of range; use a number >= 0."),
        ({"text": True}, "text=True"),
        ({"stg": float("inf")}, "stg=inf"),
        ({"modality": -1.0}, "modality=-1.0"),
        ({"modality": "3"}, "modality=3"),
        ({"rescale": 7}, "rescale=7 is out of range; use a number, 0 to 1."),
        ({"rescale": float("nan")}, "rescale=nan"),
    ],
    ids=str,
)
def test_impossible_scales_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(UNGUIDED.video, **change)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"video": replace(UNGUIDED.video, stg=1.0)}, "model.stg_blocks: is empty"),
        ({"stg_blocks": [1]}, "stg_blocks=[1]"),
        ({"stg_blocks": (True,)}, "stg_blocks=(True,)"),
        ({"stg_blocks": (-1,)}, "stg_blocks=(-1,)"),
        (
            {"video": replace(UNGUIDED.video, text=0.9), "audio": replace(UNGUIDED.audio, text=1.5)},
            "model.guidance=0.9: below 1 it leads the other way beside model.guidance_audio=1.5; 1.0 is off.",
        ),
        (
            {"video": replace(UNGUIDED.video, modality=3.0), "audio": replace(UNGUIDED.audio, modality=0.0)},
            "guidance.audio.modality=0: below 1 it leads the other way beside guidance.video.modality=3",
        ),
    ],
    ids=str,
)
def test_impossible_guidance_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(UNGUIDED, **change)
    assert str(refused.value).startswith(message)


def test_scales_below_one_are_off_where_nothing_is_guided() -> None:
    pipeline = ours(tiny_components())
    small = Ltx2Settings(height=64, width=64, frames=9, steps=2, stg=0.0, guidance_rescale=0.0)
    off = replace(small, guidance=1.0, guidance_audio=1.0, guidance_modality=1.0)
    below = replace(small, guidance=0.0, guidance_audio=0.5, guidance_modality=0.9)
    results = [pipeline.run(video_request("x", settings=each, size="tiny")) for each in (off, below)]
    assert results[0].digests == results[1].digests


@pytest.mark.parametrize(
    "change", [{"adain": 1.5}, {"tone_mapping": float("nan")}, {"sigmas": [0.9]}, {"sigmas": (1.0,)}], ids=str
)
def test_impossible_refinements_are_refused(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=f"^{name}="):
        RefinementPlan(**change)


@pytest.mark.parametrize(
    ("prompt", "negative", "name"), [("a \ud800 cat", "", "prompt"), ("x", "\udcff", "model.negative_prompt")]
)
def test_texts_that_are_no_unicode_are_refused_by_name(prompt: str, negative: str, name: str) -> None:
    pipeline = ours(tiny_components())
    settings = Ltx2Settings(height=64, width=64, frames=9, steps=2, negative_prompt=negative)
    with pytest.raises(ObservationError) as refused:
        pipeline.run(video_request(prompt, settings=settings, size="tiny"))
    assert str(refused.value).startswith(f"{name}: not valid Unicode")


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "I;16"])
def test_first_frames_of_a_request_are_rgb(mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.image: pixels of mode {mode}"):
        video_request("x", settings=Ltx2Settings(), size="tiny", image=Image.new(mode, (40, 40)))


NOT_IN_H264 = [(1, 40), (40, 1), (16386, 2)]


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("size", NOT_IN_H264)
def test_first_frames_that_h264_can_not_hold_are_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    pytest.importorskip("av")
    Image.new("RGB", size).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"model\.image: .* can't be H\.264.*use model\.image_crf=0"):
        build(compose(*BASE, f"model.image={tmp_path / 'a.png'}"))


@pytest.mark.parametrize("size", NOT_IN_H264)
def test_first_frames_that_h264_can_not_hold_are_taken_as_they_are(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    Image.new("RGB", size).save(tmp_path / "a.png")
    assert first_frame(tmp_path / "a.png").image is not None


def test_prompts_are_encoded_once() -> None:
    pipeline = ours(tiny_components())
    settings = Ltx2Settings(height=64, width=64, frames=9, steps=2)
    first = pipeline.run(video_request("one", settings=settings, size="tiny"))
    again = pipeline.run(video_request("one", settings=settings, size="tiny"))
    cache = pipeline.stages[0].cache  # type: ignore[attr-defined]
    assert (cache.hits, cache.misses) == (2, 2)
    assert again.digests == first.digests
    pipeline.refresh()
    assert pipeline.run(video_request("one", settings=settings, size="tiny")).digests == first.digests
    assert cache.misses == 4


def test_prompts_that_differ_in_outer_space_are_one() -> None:
    pipeline = ours(tiny_components())
    settings = Ltx2Settings(height=64, width=64, frames=9, steps=2, negative_prompt="dark")
    first = pipeline.run(video_request("one", settings=settings, size="tiny"))
    spaced = replace(settings, negative_prompt="dark\n")
    again = pipeline.run(video_request(" one ", settings=spaced, size="tiny"))
    cache = pipeline.stages[0].cache  # type: ignore[attr-defined]
    assert (cache.hits, cache.misses) == (2, 2)
    assert again.digests == first.digests


@pytest.mark.parametrize("padding", [0, 3], ids=["full", "padded"])
@pytest.mark.parametrize("window", [4, 1024])
@torch.inference_mode()
def test_layers_are_given_the_masks_and_tables_of_the_library(window: int, padding: int) -> None:
    encoder = copy.deepcopy(tiny_components().text_encoder)
    encoder.config.sliding_window = window
    attention_mask = torch.tensor([[0] * padding + [1] * (10 - padding)])
    given: list[dict[str, Any]] = []
    for layer in encoder.layers:
        layer.register_forward_pre_hook(lambda layer, args, kwargs: given.append(kwargs), with_kwargs=True)
    encoder(input_ids=torch.arange(10)[None], attention_mask=attention_mask)
    masks, rope = attention_masks(encoder, attention_mask), rotary_tables(encoder, 10)
    for kind, expected in zip(encoder.config.layer_types, given, strict=True):
        mask, library = masks[kind], expected["attention_mask"]
        assert (mask is None) == (library is None) == (padding == 0 and (window > 10 or "full" in kind))
        assert mask is None or torch.equal(mask, library)
        for ours_, theirs in zip(rope[kind], expected["position_embeddings"], strict=True):
            assert torch.equal(ours_, theirs)


def test_new_prompts_read_nothing_back_from_the_device() -> None:
    """The meta device has no values that could be read."""
    components, meta = tiny_components(), torch.device("meta")
    encoder = copy.deepcopy(components.text_encoder).to(meta)
    stage = TextEncoding(tokenizer=components.tokenizer, encoder=encoder, device=meta, cache_tokens=0)
    request = video_request("short", settings=Ltx2Settings(), size="tiny")
    state = State(request=request)
    stage.run(state)
    assert state["prompt_states"].states.shape == (1, components.tokenizer.length, 32 * 3)


def test_the_text_encoder_makes_no_logits_and_no_cache_of_keys() -> None:
    components = tiny_components()
    encoder = components.text_encoder
    assert {name.split(".")[0] for name in encoder.state_dict()} == {"embed_tokens", "layers", "norm"}
    given: list[set[str]] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: given.append(set(kwargs)), with_kwargs=True
        )
        for layer in encoder.layers
    ]
    settings = Ltx2Settings(height=64, width=64, frames=1, steps=2, guidance=1.0, guidance_audio=1.0)
    ours(components).run(video_request("one", settings=settings, size="tiny"))
    for hook in hooks:
        hook.remove()
    assert given == [{"attention_mask", "position_embeddings"}] * 2


def test_requests_do_not_disturb_each_other() -> None:
    pipeline = ours(tiny_components())
    small = Ltx2Settings(height=64, width=64, frames=9, steps=2)
    other = Ltx2Settings(height=64, width=96, frames=17, steps=3, guidance=1.0, guidance_audio=1.0)
    first = pipeline.run(video_request("one", settings=small, size="tiny", seed=1)).digests
    pipeline.run(video_request("two", settings=other, size="tiny", seed=2))
    assert pipeline.run(video_request("one", settings=small, size="tiny", seed=1)).digests == first
    assert pipeline.run(video_request("one", settings=small, size="tiny", seed=3)).digests != first


def first_frame(file: Path) -> VideoRequest:
    config = compose(*BASE, "model.save_as=frames", "model.image_crf=0", f"model.image={file}")
    request: VideoRequest = ours(tiny_components()).request_from(config)
    return request


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_first_frames_of_8_bits_are_taken(tmp_path: Path, mode: str) -> None:
    name = "a.tif" if mode == "CMYK" else "a.png"
    Image.new("RGB", (6, 4), (255, 255, 255)).convert(mode).save(tmp_path / name)
    request = first_frame(tmp_path / name)
    assert request.image is not None
    assert (request.image.mode, request.image.size, request.notes) == ("RGB", (6, 4), ())
    assert np.asarray(request.image).min() >= 254


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_first_frames_of_more_bits_are_refused(tmp_path: Path, dtype: type[np.generic]) -> None:
    Image.fromarray(np.full((4, 6), 300, dtype=dtype)).save(tmp_path / "a.tif")
    with pytest.raises(ConfigError, match=r"model\.image: .*save the image with 8 bits"):
        build(compose(*BASE, f"model.image={tmp_path / 'a.tif'}"))


@pytest.mark.usefixtures("nothing_is_loaded")
def test_files_that_are_no_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("<html>")
    with pytest.raises(ConfigError, match=r"model\.image: .*is no readable image"):
        build(compose(*BASE, f"model.image={tmp_path / 'a.png'}"))


def test_what_is_dropped_of_a_first_frame_is_said(tmp_path: Path) -> None:
    clear, solid = (Image.new("RGBA", (6, 4), (255, 255, 255, alpha)) for alpha in (100, 255))
    clear.save(tmp_path / "a.png", save_all=True, append_images=[solid])
    asked = replace(first_frame(tmp_path / "a.png"), height=64, width=64, frames=1)
    notes = ours(tiny_components()).run(asked).notes
    assert notes[:2] == (
        "model.image: its transparency is ignored.",
        "model.image: has 2 frames; the first one is used.",
    )


def test_released_defaults() -> None:
    plain = video_request("x", settings=Ltx2Settings(), size="full")
    assert (plain.height, plain.width, plain.frames, len(plain.sigmas)) == (512, 768, 121, 30)
    video, audio = plain.guidance.video, plain.guidance.audio
    assert (video.text, audio.text, video.stg, video.modality, video.rescale) == (3.0, 7.0, 1.0, 3.0, 0.7)
    assert plain.guidance.stg_blocks == (28,)
    distilled = video_request("x", settings=Ltx2Settings(variant="2.0-distilled"), size="full")
    assert distilled.sigmas == DISTILLED_SIGMAS
    assert not any((distilled.guidance.text, distilled.guidance.stg, distilled.guidance.modality))
