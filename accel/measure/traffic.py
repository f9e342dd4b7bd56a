"""How many bytes fused kernels move, and how many the device could move."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel.fusion import registry
from accel.fusion.gate import Gate
from accel.measure.timing import median
from accel.record import SiteOutcome

_KERNELS = "accel.fusion.kernels."
_COPY_BYTES = 2**30
_COPY_TIMES = 20


@contextmanager
def counted_traffic() -> Iterator[Counter[str]]:
    """Bytes that fused calls in this block must read and write at least, by site.

    Calls are counted where Python makes them: replays of graphs are not.
    """
    moved: Counter[str] = Counter()
    gates = [registry.gate(site.name) for site in registry.sites()]
    try:
        for gate in gates:
            vars(gate)["run"] = _counting(gate, moved)
        yield moved
    finally:
        for gate in gates:
            vars(gate).pop("run", None)


def fused_kernel_names() -> frozenset[str]:
    """Names under which a profiler shows the fused kernels that this process has loaded."""
    return frozenset(
        value.fn.__name__
        for name, module in list(sys.modules.items())
        if name.startswith(_KERNELS)
        for value in vars(module).values()
        if _is_triton_function(value)
    )


def copy_bandwidth(device: torch.device) -> float | None:
    """Bytes per second that a device-to-device copy reads and writes; `None` where there is no CUDA.

    Median of 20 copies of 1 GiB, less where memory is short.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(_COPY_BYTES, free // 4), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [_copy_seconds(target, source) for _ in range(_COPY_TIMES)]
    return 2 * source.nbytes / median(times)


def _counting(gate: Gate, moved: Counter[str]) -> Callable[..., tuple[Any, SiteOutcome]]:
    name, run = gate.site.name, gate.run

    def counted(*args: Any, **options: Any) -> tuple[Any, SiteOutcome]:
        value, outcome = run(*args, **options)
        if outcome.fused:
            moved[name] += importlib.import_module(_KERNELS + name).bytes_moved(*args)
        return value, outcome

    return counted


def _is_triton_function(value: object) -> bool:
    """Whether this is what `triton.jit` makes; asked without importing Triton, which is optional."""
    return type(value).__module__.startswith("triton.runtime.") and hasattr(value, "fn")


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(source.device)
    begin.record(stream)
    target.copy_(source)
    end.record(stream)
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))
