"""Which kernels or operators ran during one call, and for how long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from accel.measure.profile import busy_time, cuda_events, ran_on_device


class Span(NamedTuple):
    """A kernel, copy or fill on the GPU; microseconds on the profiler's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Work:
    """All runs of one kernel or operator. ms: summed; of an operator without what it calls."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True)
class Gap:
    """A time in which the GPU had nothing to run. before: the kernel that ended it."""

    ms: float
    before: str


@dataclass(frozen=True)
class Activity:
    """One call, longest work first.

    busy_ms: time in which the GPU ran at least one kernel; on a CPU the operators' own times, summed.
    gaps: longest first; the profiler slows the host down, so they are upper bounds. Empty on a CPU.
    """

    work: tuple[Work, ...]
    busy_ms: float
    gaps: tuple[Gap, ...] = ()


def observe(fn: Callable[[], Any], *, device: torch.device) -> Activity:
    """Run `fn` once under the profiler: GPU kernels on CUDA, operators by self time on a CPU."""
    return _device_activity(fn, device) if device.type == "cuda" else _host_activity(fn)


def device_activity(spans: Sequence[Span]) -> Activity:
    """Sum up what ran on a GPU."""
    grouped: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        grouped[span.name].append(span.end_us - span.start_us)
    work = [Work(name, len(times), sum(times) / 1e3) for name, times in grouped.items()]
    busy = busy_time((span.start_us, span.end_us) for span in spans) / 1e3
    return Activity(_longest_first(work), busy, _gaps(spans))


def _device_activity(fn: Callable[[], Any], device: torch.device) -> Activity:
    return device_activity(
        [
            Span(event.name, event.time_range.start, event.time_range.end)
            for event in cuda_events(fn, device=device)
            if ran_on_device(event)
        ]
    )


def _host_activity(fn: Callable[[], Any]) -> Activity:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profile:
        fn()
    work = [
        Work(row.key, row.count, row.self_cpu_time_total / 1e3)
        for row in profile.key_averages()
        if not row.is_user_annotation
    ]
    return Activity(_longest_first(work), sum(each.ms for each in work))


def _longest_first(work: list[Work]) -> tuple[Work, ...]:
    return tuple(sorted(work, key=lambda each: -each.ms))


def _gaps(spans: Sequence[Span]) -> tuple[Gap, ...]:
    gaps, reached = [], float("inf")
    for span in sorted(spans, key=lambda span: span.start_us):
        if span.start_us > reached:
            gaps.append(Gap((span.start_us - reached) / 1e3, before=span.name))
        reached = span.end_us if reached == float("inf") else max(reached, span.end_us)
    return tuple(sorted(gaps, key=lambda gap: -gap.ms))
