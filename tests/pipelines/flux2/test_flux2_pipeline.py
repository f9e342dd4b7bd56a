"""FLUX.2 as a user configures it, at tiny widths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_flux2 import make_components

from accel.errors import CheckpointError, ConfigError, ObservationError
from accel.policy import AccelPolicy
from pipelines.build import build
from pipelines.flux2.pipeline import IGNORED_GUIDANCE, Flux2Pipeline
from pipelines.flux2.prompt import PromptTokenizer
from pipelines.flux2.request import ImageRequest
from pipelines.flux2.stages import TRUNCATED, TextEncoding
from pipelines.pipeline import Placement
from tasks.config import compose

LEGAL: dict[str, Any] = {"prompt": "", "height": 32, "width": 32, "steps": 1, "guidance": 1.0}
SMALL = ("accel=eager", "device=cpu", "model.height=32", "model.width=48", "model.steps=2")


def make(*overrides: str) -> tuple[Any, Any]:
    """Pipeline and request of `python run.py OVERRIDES`."""
    config = compose(*overrides, *SMALL)
    pipeline = build(config)
    return pipeline, pipeline.request_from(config)


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        ("flux2_klein", "4b"),
        ("flux2_klein", "4b-base"),
        ("flux2_klein", "9b"),
        ("flux2_klein", "9b-base"),
        ("flux2_dev", "dev"),
    ],
)
def test_every_variant_makes_images(model: str, variant: str) -> None:
    pipeline, request = make(f"model={model}", f"model.variant={variant}", "model.images_per_prompt=2")
    result = pipeline.run(request)
    assert result.images.shape == (2, 3, 32, 48)
    assert not torch.equal(result.images[0], result.images[1])
    assert set(pipeline.files(result, config_hash="0")) == {"image_0.png", "image_1.png"}
    assert pipeline.description.model == model
    assert variant in pipeline.description.weights


@pytest.mark.parametrize(
    ("variant", "steps", "guidance"),
    [("4b", 4, 1.0), ("9b", 4, 1.0), ("4b-base", 50, 4.0), ("9b-base", 50, 4.0), ("dev", 50, 4.0)],
)
def test_a_variant_has_steps_and_guidance_of_its_own(variant: str, steps: int, guidance: float) -> None:
    model = "flux2_dev" if variant == "dev" else "flux2_klein"
    overrides = ("accel=eager", "device=cpu", f"model={model}", f"model.variant={variant}")
    pipeline = build(compose(*overrides))
    own = pipeline.request_from(compose(*overrides))
    assert (own.steps, own.guidance) == (steps, guidance)
    asked = pipeline.request_from(compose(*overrides, "model.steps=3", "model.guidance=0"))
    assert (asked.steps, asked.guidance) == (3, 0.0)
    result = pipeline.run(replace(own, height=32, width=48))
    has_second_pass = result.outputs["text_encoding.negative_prompt_embeds"] is not None
    assert has_second_pass == variant.endswith("base")


def test_the_variant_that_is_loaded_decides_what_is_left_open() -> None:
    pipeline, request = make("model=flux2_klein", "model.variant=4b-base")
    other = compose("model=flux2_klein", "model.variant=4b")
    assert pipeline.request_from(other).steps == 50
    assert pipeline.request_from(other).guidance == request.guidance == 4.0


def test_what_is_asked_for_changes_the_image(tmp_path: Path) -> None:
    """And asking again in any order does not."""
    Image.radial_gradient("L").save(tmp_path / "seen.png")
    pipeline, request = make(
        "model=flux2_klein", "model.variant=4b-base", "model.guidance=3.0", "prompt=a cat"
    )
    seen = make("model=flux2_klein", f"model.images=[{tmp_path / 'seen.png'}]")[1].references
    changes: list[dict[str, Any]] = [
        {},
        {"prompt": "a dog"},
        {"seed": 1},
        {"steps": 3},
        {"guidance": 4.0},
        {"guidance": 1.0},
        {"references": seen},
        {"references": seen * 2},
        {"height": 48},
    ]
    requests = [replace(request, **change) for change in changes]
    digests = [pipeline.run(asked).digests["vae.images"] for asked in requests]
    assert len(set(digests)) == len(changes)
    assert [pipeline.run(asked).digests["vae.images"] for asked in reversed(requests)] == digests[::-1]


def test_embedded_guidance_of_dev_changes_the_image() -> None:
    pipeline, request = make("model=flux2_dev", "model.guidance=4.0")
    other = replace(request, guidance=0.5)
    assert pipeline.run(request).digests["vae.images"] != pipeline.run(other).digests["vae.images"]
    assert pipeline.run(request).outputs["text_encoding.negative_prompt_embeds"] is None


def test_guidance_of_a_distilled_variant_is_ignored_and_said_so() -> None:
    pipeline, request = make("model=flux2_klein")
    guided = pipeline.run(replace(request, guidance=3.0))
    plain = pipeline.run(request)
    assert guided.digests == plain.digests
    assert (guided.notes, plain.notes) == ((IGNORED_GUIDANCE,), ())


def test_a_long_prompt_is_cut_with_a_note() -> None:
    pipeline, request = make("model=flux2_klein")
    long = replace(request, prompt="word " * 10_000)
    result = pipeline.run(long)
    assert result.notes == (TRUNCATED,)
    assert pipeline.run(long).notes == (TRUNCATED,)


def test_a_prompt_that_is_no_text_is_refused_with_the_request() -> None:
    with pytest.raises(ObservationError, match="prompt: not valid Unicode"):
        ImageRequest(**(LEGAL | {"prompt": "a \ud800 cat"}))


def test_prompts_are_encoded_once(eager_policy: AccelPolicy) -> None:
    components, _ = make_components("4b-base", torch.float32)
    pipeline = Flux2Pipeline(
        components,
        model="flux2_klein",
        policy=eager_policy,
        placement=Placement(
            device=torch.device("cpu"), dtype=torch.float32, size="tiny", size_reason="a test"
        ),
        outputs_mean_nothing=True,
    )
    stage = pipeline.stages[0]
    assert isinstance(stage, TextEncoding)
    request = ImageRequest(prompt="a cat", height=32, width=32, steps=1, guidance=2.0)
    first = pipeline.run(request)
    again = pipeline.run(replace(request, seed=1))
    assert (stage.cache.misses, stage.cache.hits) == (2, 2)
    assert first.digests["text_encoding.prompt_embeds"] == again.digests["text_encoding.prompt_embeds"]


@pytest.mark.parametrize("model", ["flux2_klein", "flux2_dev"])
def test_no_layer_above_the_last_that_is_read_and_no_cache_of_keys(model: str) -> None:
    """The tiny text encoders have four layers, of which the inputs of three are read, the last of layer 3."""
    pipeline, request = make(f"model={model}")
    encoder = pipeline.stages[0].modules()["text_encoder"]
    assert {name.split(".")[0] for name in encoder.state_dict()} == {"embed_tokens", "layers"}
    assert len(encoder.layers) == 3
    given: list[set[str]] = []
    for layer in encoder.layers:
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: given.append(set(kwargs)), with_kwargs=True
        )
    pipeline.run(request)
    assert given == [{"attention_mask", "position_embeddings"}] * 3


def test_weights_changed_in_place_show_after_refresh() -> None:
    pipeline, request = make("model=flux2_klein")
    before = pipeline.run(request).digests
    modules = {name: module for stage in pipeline.stages for name, module in stage.modules().items()}
    with torch.no_grad():
        modules["text_encoder"].embed_tokens.weight.mul_(1.5)
        modules["transformer"].single_stream_modulation.linear.weight.mul_(1.5)
    pipeline.refresh()
    fresh, _ = make("model=flux2_klein")
    for stage, changed in zip(fresh.stages, pipeline.stages, strict=True):
        for name, module in stage.modules().items():
            module.load_state_dict(changed.modules()[name].state_dict())
    fresh.refresh()
    after = pipeline.run(request).digests
    assert after == fresh.run(request).digests
    assert after["text_encoding.prompt_embeds"] != before["text_encoding.prompt_embeds"]
    assert after["denoising.latents"] != before["denoising.latents"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model=flux2_klein", "model.height=853"), "multiple of 16, got 853; the nearest are 848 and 864"),
        (("model=flux2_klein", "model.width=8"), "multiple of 16, got 8; the nearest are 16 and 32"),
        (("model=flux2_klein", "model.width=1000000"), "got 1000000; the largest is 8192"),
        (("model=flux2_klein", "model.width=0"), "model.width"),
        (("model=flux2_klein", "model.variant=dev"), "does not belong to model=flux2_klein"),
        (("model=flux2_dev", "model.variant=4b"), "does not belong to model=flux2_dev"),
        (("model=flux2_klein", "model.variant=5b"), "variant"),
        (("model=flux2_klein", "model.steps=0"), "steps"),
        (("model=flux2_klein", "model.steps=1001"), "steps: expected a whole number from 1 to 1000"),
        (("model=flux2_klein", "model.images_per_prompt=65"), "expected a whole number from 1 to 64, got 65"),
        (("model=flux2_klein", "model.guidance=-1"), "guidance"),
        (("model=flux2_klein", "model.images_per_prompt=0"), "images_per_prompt"),
        (("model=flux2_klein", "model.images=[1]"), "images"),
    ],
)
def test_impossible_settings_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(*overrides)


@pytest.mark.parametrize("model", ["flux2_klein", "flux2_dev"])
@pytest.mark.parametrize("prompt", ["''", "'  '", "null"])
def test_a_blank_prompt_is_refused_before_weights_are_read(model: str, prompt: str, tmp_path: Path) -> None:
    own = compose(f"model={model}", *SMALL)
    blank = compose(f"model={model}", f"prompt={prompt}", "weights=local", f"weights.path={tmp_path}", *SMALL)
    for refuse in (build, build(own).request_from):
        with pytest.raises(ConfigError, match="prompt: is empty; say what the image shows"):
            refuse(blank)


def test_a_run_without_a_prompt_makes_an_image_of_the_one_in_conf() -> None:
    pipeline, request = make("model=flux2_klein")
    assert request.prompt.startswith("A lighthouse")
    assert pipeline.run(request).prompt == request.prompt


def test_a_missing_image_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = compose(
        "model=flux2_klein",
        f"model.images=[{tmp_path / 'none.png'}]",
        "weights=local",
        f"weights.path={tmp_path}",
        *SMALL,
    )
    with pytest.raises(ConfigError, match=r"model\.images\[0\]: no file"):
        build(config)


@pytest.mark.parametrize(
    "change",
    [
        {"height": 0},
        {"width": 32.0},
        {"steps": 0},
        {"seed": -1},
        {"guidance": float("nan")},
        {"guidance": float("inf")},
        {"guidance": True},
        {"guidance": -0.5},
        {"images": True},
        {"prompt": None},
        {"prompt": ["a", "b"]},
    ],
    ids=str,
)
def test_impossible_requests_are_refused_by_field(change: dict[str, Any]) -> None:
    (field,) = change
    with pytest.raises(ConfigError, match=f"^{field}="):
        ImageRequest(**(LEGAL | change))


@pytest.mark.parametrize("field", ["height", "width"])
@pytest.mark.parametrize(
    ("pixels", "message"),
    [(40, "got 40; the nearest are 32 and 48"), (1_600_000, "got 1600000; the largest is 8192")],
)
def test_requests_have_the_sizes_of_settings(field: str, pixels: int, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.{field}: expected a multiple of 16, {message}"):
        ImageRequest(**(LEGAL | {field: pixels}))


def test_a_tokenizer_without_padding_is_refused() -> None:
    components, _ = make_components("4b", torch.float32)
    language_model = components.config.language_model

    class NoPadding:
        name_or_path = "klein/tokenizer"
        chat_template = "{{ messages }}"
        pad_token_id = None

    with pytest.raises(CheckpointError, match=r"^klein/tokenizer: .* no padding token"):
        PromptTokenizer(NoPadding(), language_model)
