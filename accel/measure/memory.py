"""Device memory at one moment."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes. allocated: in tensors. reserved: held by this process. free: left on the device."""

    allocated: int
    reserved: int
    free: int


def memory_snapshot(device: torch.device) -> MemorySnapshot | None:
    """Memory of a CUDA device, without waiting for it; `None` for other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return MemorySnapshot(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free)
