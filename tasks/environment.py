"""The software and the device of a run. Nothing personal: no host, user or folder names."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("samebit", "torch", "triton", "diffusers", "transformers", "numpy", "safetensors")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def software() -> dict[str, str]:
    """Versions by name: Python, the packages that touch numbers, CUDA and cuDNN as torch was built."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # The build suffix, such as +cu128, is part of torch's own version string alone.
    versions["torch"] = torch.__version__
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
        versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return versions


def device_facts(device: str) -> dict[str, Any]:
    """What the numbers and their speed depend on.

    device: "cpu" or "cuda[:N]". Memory in bytes.
    """
    facts: dict[str, Any] = {
        "device": device,
        "system": f"{platform.system()} {platform.machine()}",
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if not device.startswith("cuda"):
        return facts | {
            "name": "CPU",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    gpu = torch.cuda.get_device_properties(torch.device(device))
    return facts | {
        "name": gpu.name,
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "driver": _driver(),
    }


def _driver() -> str | None:
    """The NVIDIA driver's version, where the kernel tells it."""
    if not _DRIVER_FILE.exists():
        return None
    found = re.search(r"\b\d{3,}(\.\d+)+\b", _DRIVER_FILE.read_text())
    return found.group() if found else None
