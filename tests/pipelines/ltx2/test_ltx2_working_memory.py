"""What requests will hold is known, and counted, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ltx2_harness import EAGER, NO_GUIDANCE, ours, tiny_components

from accel.errors import DeviceMemoryError
from accel.graphs.tree import distinct_tensors
from accel.policy import AccelPolicy
from pipelines import device_memory
from pipelines.build import build
from pipelines.ltx2 import denoising
from pipelines.ltx2.components import Components
from pipelines.ltx2.request import VideoRequest, video_request
from pipelines.ltx2.settings import Ltx2Settings
from pipelines.ltx2.text_keys import TextKeys, text_keys
from pipelines.ltx2.transformer_pass import RotaryTables, Text, clip_tables
from pipelines.ltx2.working_memory import working_memory
from tasks.config import compose

GRAPH = replace(EAGER, enable_cuda_graph=True)
# Keys and values of 48 blocks, 1,024 tokens and widths of 4,096 and 2,048 in bf16, in GiB.
ROW = 2 * 48 * 1024 * (4096 + 2048) * 2 / 2**30
# 49 hidden states of 1,024 tokens and a width of 3,840 in bf16, in GiB.
PROMPT = 49 * 1024 * 3840 * 2 / 2**30


def tables(tokens: int) -> float:
    """Cosines and sines of half of 4,096 and 2,048 channels for video, of 2,048 for sound; fp32, in GiB."""
    return 2 * 4 * (tokens * (2048 + 1024) + 126 * (1024 + 1024)) / 2**30


def request(**settings: Any) -> VideoRequest:
    size = 128 if settings.get("two_stage") else 64
    small = {"height": size, "width": size, "frames": 9, "steps": 2}
    return video_request("A red kite", settings=Ltx2Settings(**{**small, **settings}), size="tiny")


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
    assert part("text keys", asked, EAGER, components) == (max(loops), 0)
    assert part("text keys", asked, GRAPH, components) == (max(loops), sum(loops))


def part(
    name: str, asked: VideoRequest, policy: AccelPolicy, components: Components, *, cached_tokens: int = 0
) -> tuple[int, int]:
    """What is estimated of one kind: held, and copied by graphs."""
    modules, tokens = vars(components), components.tokenizer.length
    estimate = working_memory(asked, policy, modules, tokens=tokens, cached_tokens=cached_tokens)
    return estimate[name], estimate[f"{name} in graphs"]


def test_no_keys_are_held_where_every_step_projects_the_text() -> None:
    assert part("text keys", request(), GRAPH, tiny_components("2.3")) == (0, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        NO_GUIDANCE,
        {"videos": 2, "frames": 25, "fps": 12.5},
        {"two_stage": True},
        {"two_stage": True, **NO_GUIDANCE, "width": 192},
    ],
    ids=str,
)
def test_the_estimate_is_what_rotary_tables_take(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    components = tiny_components(two_stage=bool(settings.get("two_stage")))
    made: list[RotaryTables] = []

    def noting(*args: Any, **options: Any) -> RotaryTables:
        made.append(clip_tables(*args, **options))
        return made[-1]

    monkeypatch.setattr(denoising, "clip_tables", noting)
    asked = request(**settings)
    pipeline = ours(components)
    for _ in range(2):  # the second request finds them
        pipeline.run(asked)
    storages = {
        table.untyped_storage().data_ptr(): table.untyped_storage().nbytes()
        for each in made
        for table in distinct_tensors(each)
    }
    taken = sum(storages.values())
    assert part("rotary tables", asked, EAGER, components) == (taken, 0)
    assert part("rotary tables", asked, GRAPH, components) == (taken, taken)


@pytest.mark.parametrize("guidance", [{}, NO_GUIDANCE], ids=["guided", "unguided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_is_what_encoded_prompts_take(dtype: torch.dtype, guidance: dict[str, Any]) -> None:
    components = tiny_components(dtype=dtype)
    asked = request(**guidance)
    outputs = ours(components).run(asked).outputs
    prompts = [outputs["text_encoding.prompt_states"], outputs["text_encoding.negative_states"]]
    taken = [prompt.states.nbytes + prompt.mask.nbytes for prompt in prompts if prompt is not None]
    assert len(taken) == 1 + asked.guidance.text
    assert part("encoded prompts", asked, EAGER, components) == (sum(taken), 0)
    full_cache = {"cached_tokens": 5 * components.tokenizer.length}
    assert part("encoded prompts", asked, GRAPH, components, **full_cache) == (5 * taken[0], sum(taken))


@pytest.mark.parametrize(
    ("choice", "held", "copied", "tables"),
    [
        (("accel=eager",), 3 * ROW, 0.0, 2 * tables(6144)),
        (("accel=graph", "model.two_stage=true"), 3 * ROW, 4 * ROW, 2 * tables(1536) + tables(6144)),
        (
            ("accel=graph", "model.variant=2.0-distilled", "model.videos=4"),
            4 * ROW,
            4 * ROW,
            4 * tables(6144),
        ),
    ],
    ids=["eager", "two stages", "distilled"],
)
def test_released_widths_are_refused_with_what_requests_hold(
    choice: tuple[str, ...],
    held: float,
    copied: float,
    tables: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 2**30)
    with pytest.raises(DeviceMemoryError) as refused:
        build(compose("model=ltx2", "device=cpu", "size=full", "dtype=bf16", "model.save_as=frames", *choice))
    table = dict(line.strip().removesuffix(" GiB").rsplit(maxsplit=1) for line in lines(refused.value))
    assert float(table["text keys"]) == pytest.approx(held, abs=0.01)
    assert float(table["text keys in graphs"]) == pytest.approx(copied, abs=0.01)
    assert float(table["rotary tables"]) == pytest.approx(tables, abs=0.01)
    assert float(table["encoded prompts"]) == pytest.approx(4 * PROMPT, abs=0.01)


def lines(refusal: DeviceMemoryError) -> list[str]:
    return [line for line in str(refusal).splitlines() if line.endswith("GiB")]
