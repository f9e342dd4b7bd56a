"""What fits a device, asked before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from accel.errors import DeviceMemoryError

_GIB = 2**30


def module_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers. Works on the meta device, where nothing is allocated."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device; available RAM for the CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_fits(needed: Mapping[str, int], device: torch.device) -> None:
    """Refuse components that do not fit together.

    needed: component name -> bytes.
    Raises: DeviceMemoryError with one line per component and the free amount.
    """
    total, free = sum(needed.values()), free_bytes(device)
    if total <= free:
        return
    width = max(len(name) for name in (*needed, "needed"))
    rows = (*needed.items(), ("needed", total), ("free", free))
    table = "\n".join(f"  {name:<{width}}  {amount / _GIB:8.2f} GiB" for name, amount in rows)
    raise DeviceMemoryError(
        f"The weights do not fit {device}:\n{table}\n"
        "Use a smaller variant (fp8r), size=tiny, a device with more memory, or end what fills it."
    )
