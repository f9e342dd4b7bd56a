"""What a pipeline makes of its device: launches counted on both sides, the caller's modes kept out."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from accel.measure.profile import profile_call
from pipelines.build import build
from tasks.config import compose

pytestmark = pytest.mark.gpu

KERNELS = 20


def test_a_replay_is_one_call_of_the_host_and_as_many_kernels_as_before() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(1024, device=device)

    def work() -> Tensor:
        y = x
        for _ in range(KERNELS):
            y = y * 1.5
        return y

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    eager, replayed = profile_call(work, device=device), profile_call(graph.replay, device=device)
    assert eager is not None
    assert replayed is not None
    assert (eager.launches, eager.host_launches) == (KERNELS, KERNELS)
    assert (replayed.launches, replayed.host_launches) == (KERNELS, 1)


@pytest.mark.parametrize("accel", ["eager", "graph", "segmented", "fused", "graph+fused"])
@pytest.mark.parametrize("model", ["flux3_action", "flux2_klein", "ltx2"])
def test_a_dropped_pipeline_gives_its_memory_back(model: str, accel: str) -> None:
    """A sweep runs one after the other."""
    config = compose(f"model={model}", "size=tiny", "device=cuda", f"accel={accel}", "model.steps=2")

    def held_after_a_run() -> int:
        pipeline = build(config)
        pipeline.run(pipeline.request_from(config))
        pipeline.close()
        del pipeline
        gc.collect()
        return torch.cuda.memory_allocated()

    held = held_after_a_run()  # what libraries keep for good is there from now on
    assert held_after_a_run() <= held


def test_autocast_of_the_caller_changes_nothing() -> None:
    config = compose("size=tiny", "device=cuda", "dtype=fp32", "accel=eager")
    pipeline = build(config)
    request = pipeline.request_from(config)
    expected = pipeline.run(request).digests
    with torch.autocast("cuda", torch.float16):
        assert pipeline.run(request).digests == expected
    pipeline.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("accel", ["fused", "graph+fused"])
def test_another_device_than_the_current_one_serves_as_well(accel: str) -> None:
    results = {}
    for device in ("cuda:0", "cuda:1"):
        config = compose("size=tiny", f"device={device}", f"accel={accel}")
        pipeline = build(config)
        request = pipeline.request_from(config)
        results[device] = [pipeline.run(request).digests for _ in range(2)]
        sites = [site for stage in pipeline.record.stages.values() for site in stage.sites]
        assert sites
        assert not [site for site in sites if "current device" in site.detail]
        pipeline.close()
    assert torch.cuda.current_device() == 0
    assert results["cuda:0"] == results["cuda:1"]
