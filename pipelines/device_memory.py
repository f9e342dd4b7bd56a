"""What fits a device, asked before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from accel.errors import DeviceMemoryError

_GIB = 2**30

# What activations, workspaces and other programs need beside the weights: this share of the device's
# memory, or these bytes where they are more; but for small models no more than is needed.
_MARGIN_SHARE = 0.1
_MARGIN_BYTES = 2 * _GIB


def module_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers. Works on the meta device, where nothing is allocated."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device; available RAM for the CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch keeps memory that nothing uses any more, e.g. of an earlier pipeline of this process.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _ram("MemAvailable", "SC_AVPHYS_PAGES")


def total_bytes(device: torch.device) -> int:
    """Bytes of the device's memory; RAM for the CPU."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return total
    return _ram("MemTotal", "SC_PHYS_PAGES")


def require_fits(needed: Mapping[str, int], device: torch.device) -> None:
    """Refuse what does not fit together, with a margin for what runs on it.

    needed: bytes by name, of components and of what else is known to be held. The margin is 10 % of the
    device's memory or 2 GiB, whichever is more, but at most the bytes needed.
    Raises: DeviceMemoryError with one line per name, the margin and the free amount.
    """
    total, free = sum(needed.values()), free_bytes(device)
    margin = min(total, max(int(_MARGIN_SHARE * total_bytes(device)), _MARGIN_BYTES))
    if total + margin <= free:
        return
    rows = {**needed, "needed": total, "margin": margin, "free": free}
    width = max(map(len, rows))
    table = "\n".join(f"  {name:<{width}}  {amount / _GIB:8.2f} GiB" for name, amount in rows.items())
    raise DeviceMemoryError(
        f"The model, with a margin for activations, does not fit {device}:\n{table}\n"
        "Use a smaller variant, size=tiny, a device with more memory, or end what fills it."
    )


def _ram(line_name: str, pages_name: str) -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith(f"{line_name}:"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf(pages_name) * os.sysconf("SC_PAGE_SIZE")
