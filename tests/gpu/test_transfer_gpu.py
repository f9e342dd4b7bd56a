"""What a request makes on the host reaches the device without either waiting for the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipelines.build import build
from pipelines.progress import NULL_PROGRESS
from pipelines.upload import upload
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
