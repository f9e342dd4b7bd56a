"""What the GPU did during one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from accel.measure.timing import synchronize


class DeviceActivity(NamedTuple):
    """launches: kernels, copies and fills that ran. gpu_busy_ms: time in which at least one ran."""

    launches: int
    gpu_busy_ms: float


def profile_call(fn: Callable[[], Any], *, device: torch.device) -> DeviceActivity | None:
    """Run `fn` once under the profiler; `None` where there is no CUDA, `fn` is then not called."""
    if device.type != "cuda":
        return None
    synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profile:
        fn()
        synchronize(device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return DeviceActivity(len(spans), busy_time(spans) / 1e3)


def busy_time(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals, in their unit."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy
