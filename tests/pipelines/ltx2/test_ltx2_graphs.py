"""LTX-2 with graphs, on the backend that replays recorded operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention
from ltx2_harness import EAGER, NO_GUIDANCE, ours, picture, tiny_components
from torch import Tensor

import pipelines.pipeline
from accel.graphs.manifest import Manifest
from accel.graphs.program import SegmentedGraph
from accel.graphs.recording import RecordingBackend
from accel.graphs.segmented import SegmentedRecorder
from accel.graphs.tree import distinct_tensors
from accel.policy import AccelPolicy
from accel.record import Kind, Reason
from accel.runner import Runner
from pipelines.build import build
from pipelines.ltx2.attention_breaks import break_at_attention
from pipelines.ltx2.guidance import UNGUIDED
from pipelines.ltx2.pipeline import Ltx2Pipeline
from pipelines.ltx2.request import VideoRequest, video_request
from pipelines.ltx2.settings import Ltx2Settings
from tasks.config import compose

HOST = torch.float64  # stands for host memory
GRAPH = replace(EAGER, name="graph", enable_cuda_graph=True)
SEGMENTED = ("model=ltx2", "accel=segmented", "device=cpu", "size=tiny", "model.attention_breaks=true")


@pytest.fixture
def on_recording_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))


def request(variant: str = "2.3", *, two_stage: bool, **settings: Any) -> VideoRequest:
    size = 128 if two_stage else 64
    small = {"height": size, "width": size, "frames": 9, "steps": 2, "image_crf": 0}
    choice = Ltx2Settings(variant=variant, two_stage=two_stage, **small, **settings)
    return video_request("A red kite", settings=choice, size="tiny", image=picture())


@pytest.mark.usefixtures("on_recording_backend")
@pytest.mark.parametrize(
    ("policy", "two_stage", "stages_with_regions"),
    [
        (replace(GRAPH, loop="step"), False, 7),
        (GRAPH, True, 9),
    ],
    ids=["one stage", "two stages"],
)
@pytest.mark.parametrize("variant", ["2.0", "2.3"])
def test_every_region_is_replayed_with_the_bits_of_eager(
    variant: str, policy: AccelPolicy, two_stage: bool, stages_with_regions: int
) -> None:
    components = tiny_components(variant, two_stage=two_stage)
    eager, graphed = ours(components), ours(components, policy=policy)
    first = request(variant, two_stage=two_stage)
    second = replace(first, seed=7, prompt="something else")

    served = [graphed.run(asked).digests for asked in (first, second)]
    assert served == [eager.run(asked).digests for asked in (first, second)]
    assert served[0] != served[1]

    stages = [stage for stage in graphed.record.stages.values() if stage.outcomes]
    assert len(stages) == stages_with_regions
    for stage in stages:
        assert {outcome.kind for outcome in stage.outcomes} == {Kind.CAPTURED, Kind.REPLAYED}


@pytest.mark.usefixtures("on_recording_backend")
@pytest.mark.parametrize("variant", ["2.0", "2.3"])
def test_a_manifest_of_one_run_serves_the_first_request_of_the_next(variant: str) -> None:
    components = tiny_components(variant, two_stage=True)
    earlier, later = ours(components, policy=GRAPH), ours(components, policy=GRAPH)
    asked = request(variant, two_stage=True)
    expected = earlier.run(asked).digests
    later.capture_manifest(Manifest().updated(earlier.used_signatures()))
    assert later.run(asked).digests == expected
    stages = [stage for stage in later.record.stages.values() if stage.outcomes]
    assert {outcome.kind for stage in stages for outcome in stage.outcomes} == {Kind.REPLAYED}


@pytest.mark.usefixtures("on_recording_backend")
@pytest.mark.parametrize("two_stage", [False, True])
@pytest.mark.parametrize(
    "change", [{"frames": 17}, {"height": 128, "width": 192}, {"guidance": UNGUIDED}], ids=str
)
def test_a_warm_up_of_true_shapes_serves_every_prompt(two_stage: bool, change: dict[str, Any]) -> None:
    components = tiny_components("2.0", two_stage=two_stage)
    eager = ours(components)
    graphed = ours(components, policy=replace(GRAPH, capture="explicit"))
    asked = request("2.0", two_stage=two_stage)
    graphed.warm_up([asked])
    graphed.new_record()
    for prompt in ("A", "a much longer prompt " * 5):
        served = replace(asked, prompt=prompt, seed=9)
        assert graphed.run(served).digests == eager.run(served).digests
    assert kinds(graphed) == {(Kind.REPLAYED, None)}

    other = replace(asked, **change)
    assert graphed.run(other).digests == eager.run(other).digests
    assert kinds(graphed) == {(Kind.REPLAYED, None), (Kind.EAGER, Reason.NOT_WARMED)}


def kinds(pipeline: Ltx2Pipeline) -> set[tuple[Kind, Reason | None]]:
    stages = pipeline.record.stages.values()
    return {(outcome.kind, outcome.reason) for stage in stages for outcome in stage.outcomes}


@pytest.mark.usefixtures("on_recording_backend")
@pytest.mark.parametrize("variant", ["2.0", "2.3"])
def test_breaks_at_attention_when_asked(variant: str) -> None:
    """Two blocks: six attentions each in two kinds of passes, four with isolated modalities.

    A pass needs room for 13 segments; the 34 of a step need none.
    """
    choice = (f"model.variant='{variant}'", "model.two_stage=true")
    broken = build(compose(*SEGMENTED, *choice, "accel.max_segments=13"))
    asked = request(variant, two_stage=True)
    assert broken.run(asked).digests == broken.with_policy(EAGER).run(asked).digests
    for name, breaks in (("denoising", 2 * (6 + 6 + 4)), ("refinement", 2 * 6)):
        record = broken.record.stages[name]
        assert len(record.breaks) == breaks
        assert all("LTX2Attention.forward (declared)" in line for line in record.breaks)
        assert {outcome.kind for outcome in record.outcomes} == {Kind.CAPTURED, Kind.REPLAYED}


@pytest.mark.usefixtures("on_recording_backend")
def test_no_breaks_unless_asked() -> None:
    policy = replace(GRAPH, graph_mode="segmented")
    pipeline = ours(tiny_components("2.3"), policy=policy)
    pipeline.run(request(two_stage=False, guidance_modality=1.0))
    assert {name: stage.breaks for name, stage in pipeline.record.stages.items() if stage.breaks} == {}


@pytest.mark.usefixtures("on_recording_backend")
def test_too_many_segments_run_eager_by_name() -> None:
    pipeline = build(compose(*SEGMENTED, "model.variant='2.3'", "accel.max_segments=12"))
    pipeline.run(request(two_stage=False, **NO_GUIDANCE))
    reasons = {outcome.reason for outcome in pipeline.record.stages["denoising"].outcomes}
    assert Reason.TOO_MANY_SEGMENTS in reasons


@torch.inference_mode()
def test_deeper_transformers_do_not_hold_more_of_what_attention_reads() -> None:
    assert memory_read_by_attention(depth=2) == memory_read_by_attention(depth=4)


def memory_read_by_attention(*, depth: int) -> int:
    """How many pieces of memory the attentions of `depth` blocks are given during a replay."""
    transformer = copy.deepcopy(tiny_components("2.0").transformer)
    blocks = transformer.transformer_blocks
    blocks.extend(copy.deepcopy(blocks[0]) for _ in range(depth - len(blocks)))
    addresses: list[int] = []

    def noting(attend: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = distinct_tensors((args, kwargs))
        addresses.extend(tensor.untyped_storage().data_ptr() for tensor in given)
        return attend(*args, **kwargs)

    for module in transformer.modules():
        if isinstance(module, LTX2Attention):
            module.forward = partial(noting, module.forward)
    break_at_attention(transformer)
    _, forward = stock_forward(transformer)
    graph = recorded(forward)
    addresses.clear()
    graph.replay()
    assert len(addresses) > 6 * depth
    return len(set(addresses))


def recorded(fn: Callable[[], Any]) -> SegmentedGraph:
    backend = RecordingBackend(host_dtype=HOST)
    with backend.warm_stream():
        return SegmentedRecorder(backend, max_segments=512, name="stock")(fn, backend.new_pool())


def stock_forward(transformer: Any) -> tuple[Tensor, Callable[[], Any]]:
    """Video latents and the library's forward on them, which leaves it to make its coordinates."""
    config = transformer.config
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    video, text = draw(1, 2 * 2 * 2, config.in_channels), draw(1, 8, config.caption_channels)
    timestep = torch.tensor([700.0])
    return video, partial(
        transformer,
        hidden_states=video,
        audio_hidden_states=draw(1, 5, config.audio_in_channels),
        encoder_hidden_states=text,
        audio_encoder_hidden_states=text,
        timestep=timestep,
        sigma=timestep,
        num_frames=2,
        height=2,
        width=2,
        audio_num_frames=5,
        return_dict=False,
    )


@torch.inference_mode()
def test_the_stock_forward_without_coordinates_is_carried_by_automatic_breaks() -> None:
    """Coordinates that are not hoisted are lists that the forward brings to the device."""
    video, forward = stock_forward(tiny_components("2.0").transformer)
    graph = recorded(forward)
    assert len(graph.breaks) == 2
    for line in map(str, graph.breaks):
        assert line.startswith("transformer_ltx2.py:")
        assert line.endswith("torch.tensor (automatic)")
    for _ in range(2):
        video.copy_(torch.randn_like(video))
        graph.replay()
        for replayed, expected in zip(graph.outputs, forward(), strict=True):
            assert torch.equal(replayed, expected)
