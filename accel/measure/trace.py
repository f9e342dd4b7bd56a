"""A timeline for chrome://tracing or Perfetto, with named ranges."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from accel.measure.timing import synchronize

Step = Callable[[], None]


def chrome_trace(fn: Callable[[], Any], *, device: torch.device) -> bytes:
    """Run `fn` once under the profiler. Returns: gzipped Chrome trace JSON of host and device."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        fn()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profile.export_chrome_trace(str(path))
        return path.read_bytes()


def stage_range(name: str, call: Callable[[], None]) -> None:
    """Run `call` as the range "stage NAME"; for `accel.measure.stage_calls.around_stages`."""
    _in_range(f"stage {name}", call)


def named_steps(steps: Sequence[Step], name: str) -> Sequence[Step]:
    """The same steps, each a range "NAME number" where a profiler runs; else `steps` itself."""
    if not torch._C._autograd._profiler_enabled():
        return steps
    return [partial(_in_range, f"{name} {number}", step) for number, step in enumerate(steps)]


def _in_range(name: str, step: Step) -> None:
    with record_function(name):
        step()
