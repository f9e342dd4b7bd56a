"""A folder holds the variant that the user named, or the run says that it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from tiny_flux2 import make_components
from transformers import Qwen3Config, Qwen3ForCausalLM

from accel.errors import CheckpointError
from pipelines import synthetic_weights
from pipelines.build import build
from pipelines.flux2.config import flux2_config
from pipelines.module_building import build_on_meta
from tasks.config import compose

NARROW = (
    "num_attention_heads is 2, not 24; num_layers is 1, not 5; num_single_layers is 2, not 20; "
    "joint_attention_dim is 96, not 7680"
)
SMALL = ("accel=eager", "device=cpu", "model.height=32", "model.width=48", "model.steps=2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tiny widths, but as many text layers as the variants read."""
    theirs = make_components("4b", torch.float32)[1]
    theirs.save_pretrained(tmp_path / "klein")
    deep = dict(flux2_config("4b", "tiny").text_encoder) | {"num_hidden_layers": 28}
    encoder = Qwen3ForCausalLM(Qwen3Config.from_dict(deep))
    synthetic_weights.fill(encoder, seed=3)
    encoder.save_pretrained(tmp_path / "klein" / "text_encoder")
    return tmp_path / "klein"


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(folder: Path, variant: str) -> tuple[Any, Any]:
    model = ("model=flux2_klein", f"model.variant={variant}", "weights=local", f"weights.path={folder}")
    config = compose(*model, *SMALL)
    pipeline = build(config)
    return pipeline, pipeline.request_from(config)


@pytest.mark.parametrize(
    ("named", "held"), [("4b", "9b"), ("9b", "4b"), ("4b-base", "9b-base"), ("9b-base", "4b-base")]
)
def test_a_folder_of_another_variant_is_refused_by_its_name(folder: Path, named: str, held: str) -> None:
    full, expected = flux2_config(held, "full"), flux2_config(named, "full")
    rewrite(folder / "model_index.json", is_distilled=full.distilled)
    rewrite(folder / "transformer" / "config.json", **full.transformer)
    heads = (config.transformer["num_attention_heads"] for config in (full, expected))
    with pytest.raises(CheckpointError) as refusal:
        load(folder, named)
    message = str(refusal.value)
    assert message.startswith(f"{folder}/transformer/config.json: ")
    assert "num_attention_heads is {}, not {};".format(*heads) in message
    assert message.endswith(
        f"as in model.variant={named}. These are the widths of {held}: use model.variant={held}."
    )


def test_widths_of_no_variant_are_told_in_header_result_and_file(folder: Path) -> None:
    pipeline, request = load(folder, "4b")
    result = pipeline.run(request)
    assert result.notes == (f"model.variant=4b: these weights have widths of their own: {NARROW}.",)
    assert pipeline.description.weights.endswith(f", widths of their own: {NARROW}")
    (image,) = pipeline.files(result, config_hash="0").values()
    assert NARROW.encode() in image
    assert pipeline.with_policy(compose("accel=eager").accel).run(request).notes == result.notes


def test_the_widths_of_dev_are_those_that_diffusers_has() -> None:
    """They are written out, to be compared with."""
    written = flux2_config("dev", "full").transformer
    own = build_on_meta(Flux2Transformer2DModel, dtype=torch.bfloat16).config
    assert written == {name: own[name] for name in written}
