"""What the GPU did during one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from accel.measure.timing import synchronize

# Calls of the CUDA runtime and driver that hand work to the GPU. One replayed graph is one of them.
_HOST_LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


class DeviceActivity(NamedTuple):
    """One call as the GPU and the host saw it.

    launches: kernels, copies and fills that ran on the GPU. gpu_busy_ms: time in which at least one ran.
    host_launches: calls by which the host started them; a replayed graph of many kernels is one.
    """

    launches: int
    gpu_busy_ms: float
    host_launches: int


def profile_call(fn: Callable[[], Any], *, device: torch.device) -> DeviceActivity | None:
    """Run `fn` once under the profiler; `None` where there is no CUDA, `fn` is then not called."""
    if device.type != "cuda":
        return None
    events = cuda_events(fn, device=device)
    spans = [(event.time_range.start, event.time_range.end) for event in events if ran_on_device(event)]
    host_launches = count_host_launches(event.name for event in events)
    return DeviceActivity(len(spans), busy_time(spans) / 1e3, host_launches)


def cuda_events(fn: Callable[[], Any], *, device: torch.device) -> Sequence[Any]:
    """The profiler's events of one call on a CUDA device, those of the host's launches included."""
    synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profile:
        fn()
        synchronize(device)
    return profile.events() or ()


def ran_on_device(event: Any) -> bool:
    """Whether it is a kernel, copy or fill on the GPU."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def count_host_launches(names: Iterable[str]) -> int:
    """How many of these CUDA runtime and driver calls start work; variants like cuLaunchKernelEx included."""
    return sum(name.startswith(_HOST_LAUNCHES) for name in names)


def busy_time(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals, in their unit."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy
