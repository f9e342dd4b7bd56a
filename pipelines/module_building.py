"""Library modules without their initial weights: parameters on the meta device first, then allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipelines.device_memory import module_bytes, require_fits
from pipelines.progress import NULL_PROGRESS, Progress

ModuleFactory = Callable[[], nn.Module]


def build_modules(
    factories: Mapping[str, ModuleFactory],
    *,
    fill: Callable[[str, nn.Module], None],
    check: Callable[[Mapping[str, nn.Module]], None] = lambda modules: None,
    working_memory: Callable[[Mapping[str, nn.Module]], Mapping[str, int]] = lambda modules: {},
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, nn.Module]:
    """Make every module on `device`, ready for inference.

    factories: component name -> what constructs it. fill: (name, module) -> writes its weights.
    check: looks at all modules while nothing is allocated, and raises. working_memory: bytes by name that
        requests will hold beside these weights.
    dtype: of parameters, and of buffers that follow torch's default dtype.
    Raises: DeviceMemoryError before anything is allocated; what `check` and `fill` raise.
    """
    modules = {name: build_on_meta(make, dtype=dtype) for name, make in factories.items()}
    check(modules)
    weights = {name: module_bytes(module) for name, module in modules.items()}
    require_fits({**weights, **working_memory(modules)}, device)
    progress.start("weights", len(modules))
    for name, module in modules.items():
        allocate(module, device)
        fill(name, module)
        module.eval().requires_grad_(False)
        progress.advance("weights")
    progress.finish("weights")
    return modules


def build_on_meta(make: ModuleFactory, *, dtype: torch.dtype) -> nn.Module:
    """Construct a module with its parameters on the meta device and its buffers on the CPU.

    Buffers hold what the class computes, the same bits for every device that they move to. As when
    the libraries load a checkpoint, `dtype` is torch's default meanwhile, so tables that a class
    asks for in float32 stay float32.
    """
    with _default_dtype(dtype), _parameters_on_meta(), torch.device("cpu"):
        return make()


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give parameters uninitialised memory on `device` and move buffers there; what is shared stays so."""
    allocated = {
        parameter: nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        for parameter in module.parameters()
    }
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, allocated[parameter])
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, buffer.to(device))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    hook: Any = _on_meta  # may return a parameter to take the place of its own, though it is typed not to
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:  # a shared parameter stays shared
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
