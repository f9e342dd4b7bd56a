"""Clocks, temperature, power and throttling of a GPU: what a timing may owe to the moment."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field

import torch

_SECONDS = 20
_QUERY = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "pstate",
    "clocks_event_reasons.active",
)
_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
_HARMLESS = {"idle", "application clocks"}


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """values: as nvidia-smi prints them, by its own names. clock_limits: why clocks are below their maximum.
    unavailable: why nothing is known; empty where something is.
    """

    values: dict[str, str] = field(default_factory=dict)
    clock_limits: tuple[str, ...] = ()
    unavailable: str = ""

    @property
    def throttled(self) -> bool:
        """Whether heat or power slowed the GPU down at that moment."""
        return not _HARMLESS.issuperset(self.clock_limits)


def gpu_state(device: torch.device) -> GpuState:
    """The state now. Never raises: timings without it are still timings."""
    if device.type != "cuda":
        return GpuState(unavailable=f"{device.type} is no GPU")
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return GpuState(unavailable=f"nvidia-smi: {error}")
    if done.returncode != 0:
        return GpuState(unavailable=f"nvidia-smi: {(done.stdout or done.stderr).strip()}")
    return parse_state(done.stdout)


def parse_state(line: str) -> GpuState:
    """One line of nvidia-smi's CSV."""
    cells = [cell.strip() for cell in line.strip().split(",")]
    if len(cells) != len(_QUERY):
        return GpuState(unavailable=f"nvidia-smi printed {line.strip()!r}")
    values = dict(zip(_QUERY, cells, strict=True))
    try:
        active = int(values["clocks_event_reasons.active"], 16)
    except ValueError:  # "[Not Supported]"
        active = 0
    return GpuState(values=values, clock_limits=tuple(name for bit, name in _REASONS.items() if active & bit))
