"""Uploads that wait for nobody, and results that come back as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipelines.build import build
from pipelines.progress import NULL_PROGRESS
from pipelines.transfer import read_back, upload
from stages.stage import State
from tasks.config import compose

pytestmark = pytest.mark.gpu

CYCLES = 2_000_000_000  # about a second
SIZE = 1_000_000


def test_the_host_goes_on_while_the_device_is_busy_and_may_write_over_what_it_sent() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    upload(torch.zeros(SIZE), device)  # from now on there is memory on both sides
    torch.cuda.synchronize()
    values = torch.arange(SIZE, dtype=torch.float32)
    expected = values.clone()
    torch.cuda._sleep(CYCLES)
    copy = upload(values, device)
    assert not torch.cuda.current_stream().query()
    values.zero_()
    others = [upload(torch.full((SIZE,), float(n)), device) for n in range(4)]
    assert torch.equal(copy.cpu(), expected)
    for n, other in enumerate(others):
        assert torch.equal(other.cpu(), torch.full((SIZE,), float(n)))


LARGE = (2, 3, 31, 200, 301)  # bf16 of this size fills several buffers, the last one in part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize(
    "view",
    [
        lambda values: values,
        lambda values: values.transpose(1, 2),
        lambda values: values.to(memory_format=torch.channels_last_3d),
        lambda values: values[1],  # begins within its memory
        lambda values: values[..., 1:],  # has gaps
        lambda values: values[:1].expand(5, -1, -1, -1, -1),  # shares memory
        lambda values: values[0, 0, 0],  # small
        lambda values: values[:0],
    ],
    ids=["contiguous", "transposed", "channels_last", "offset", "gaps", "shared", "small", "empty"],
)
def test_read_back_gives_the_bits_in_ordinary_memory(view, dtype: torch.dtype) -> None:
    values = torch.randint(0, 256, LARGE, dtype=torch.uint8)
    values = view(values.cuda().to(dtype) / 3 if dtype.is_floating_point else values.cuda())
    result, expected = read_back(values), values.cpu()
    assert result.device.type == "cpu"
    assert not result.is_pinned()
    assert result.dtype == expected.dtype
    assert torch.equal(result.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_read_back_waits_for_what_the_device_has_yet_to_do() -> None:
    values = torch.zeros(16 * SIZE, device="cuda")
    torch.cuda._sleep(CYCLES)
    values += 1
    assert read_back(values).min() == 1


@pytest.mark.parametrize("accel", ["eager", "graph", "graph+fused"])
def test_no_stage_of_flux3_waits_for_the_device_before_the_last(accel: str) -> None:
    config = compose("size=tiny", "device=cuda", f"accel={accel}")
    pipeline = build(config)
    request = pipeline.request_from(config)
    expected = [pipeline.run(request) for _ in range(3)][-1]  # captions are encoded, graphs captured
    state = State(request=request, progress=NULL_PROGRESS)
    *early, last = pipeline.stages
    with torch.inference_mode():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for stage in early:
                stage.run(state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        last.run(state)
    assert np.array_equal(state["actions"].numpy(), expected.actions)
    pipeline.close()
