"""What requests will hold is known, and counted, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ltx2_harness import EAGER, NO_GUIDANCE, ours, tiny_components

from accel.errors import DeviceMemoryError
from accel.policy import AccelPolicy
from pipelines import device_memory
from pipelines.build import build
from pipelines.ltx2 import denoising
from pipelines.ltx2.request import VideoRequest, video_request
from pipelines.ltx2.settings import Ltx2Settings
from pipelines.ltx2.text_keys import TextKeys, text_keys
from pipelines.ltx2.transformer_pass import Text
from pipelines.ltx2.working_memory import text_memory
from tasks.config import compose

GRAPH = replace(EAGER, enable_cuda_graph=True)
# Keys and values of 48 blocks, 1,024 tokens and widths of 4,096 and 2,048 in bf16, in GiB.
ROW = 2 * 48 * 1024 * (4096 + 2048) * 2 / 2**30


def request(**settings: Any) -> VideoRequest:
    size = 128 if settings.get("two_stage") else 64
    small = {"height": size, "width": size, "frames": 9, "steps": 2}
    return video_request("A red kite", settings=Ltx2Settings(**small, **settings), size="tiny")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        NO_GUIDANCE,
        {"guidance_modality": 1.0},
        {**NO_GUIDANCE, "stg": 1.0, "videos": 2},
        {"videos": 2},
        {"two_stage": True},
        {"two_stage": True, **NO_GUIDANCE},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_is_what_a_loop_holds(
    settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_stage = bool(settings.get("two_stage"))
    components = tiny_components(dtype=dtype, two_stage=two_stage)
    made: list[int] = []

    def noting(transformer: Any, text: Text) -> Text | TextKeys:
        keys = text_keys(transformer, text)
        assert isinstance(keys, TextKeys)
        made.append(sum(part.nbytes for of in (keys.video, keys.audio) for part in (of.keys, of.values)))
        return keys

    monkeypatch.setattr(denoising, "text_keys", noting)
    asked = request(**settings)
    ours(components).run(asked)
    loops = [sum(made[:-1]), made[-1]] if two_stage else [sum(made)]

    def estimate(policy: AccelPolicy) -> dict[str, int]:
        return text_memory(asked, policy, components.transformer, tokens=components.tokenizer.length)

    assert estimate(EAGER) == {"text keys": max(loops), "text keys in graphs": 0}
    assert estimate(GRAPH) == {"text keys": max(loops), "text keys in graphs": sum(loops)}


def test_nothing_is_held_where_every_step_projects_the_text() -> None:
    components = tiny_components("2.3")
    assert text_memory(request(), GRAPH, components.transformer, tokens=128) == {}


@pytest.mark.parametrize(
    ("choice", "held", "copied"),
    [
        (("accel=eager",), 3 * ROW, 0.0),
        (("accel=graph", "model.two_stage=true"), 3 * ROW, 4 * ROW),
        (("accel=graph", "model.variant=2.0-distilled", "model.videos=4"), 4 * ROW, 4 * ROW),
    ],
    ids=["eager", "two stages", "distilled"],
)
def test_released_widths_are_refused_with_what_requests_hold(
    choice: tuple[str, ...], held: float, copied: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 2**30)
    with pytest.raises(DeviceMemoryError) as refused:
        build(compose("model=ltx2", "device=cpu", "size=full", "dtype=bf16", "model.save_as=frames", *choice))
    table = dict(line.strip().removesuffix(" GiB").rsplit(maxsplit=1) for line in lines(refused.value))
    assert float(table["text keys"]) == pytest.approx(held, abs=0.01)
    assert float(table["text keys in graphs"]) == pytest.approx(copied, abs=0.01)


def lines(refusal: DeviceMemoryError) -> list[str]:
    return [line for line in str(refusal).splitlines() if line.endswith("GiB")]
