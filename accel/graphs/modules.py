"""Watches the modules behind a stage: whether their weights moved, and whether graphs may run at all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module_globals

from accel.record import Kind, Outcome, Reason

_SLOTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ModuleWatch:
    """Cheap per-call checks of a stage's modules.

    epoch: grows when a parameter, buffer or submodule is replaced, added or removed, or its data moves.
    A copy into a parameter is no change: graphs read it by address. A `.data` assignment that keeps
    the address but alters shape or dtype is not seen.
    """

    def __init__(self, modules: Callable[[], Mapping[str, nn.Module]], device: torch.device) -> None:
        self._modules = modules
        self._device = device
        self.epoch = 0
        self._roots: list[nn.Module] = []
        self._scan(modules())

    def refusal(self) -> Outcome | None:
        """Notice changes; then say why no graph may run now, if so."""
        roots = self._modules()
        if not _same(list(roots.values()), self._roots) or self._changed():
            self.epoch += 1
            self._scan(roots)
        if self._misplaced is not None:
            return self._misplaced
        if any(map(operator.itemgetter("training"), self._dicts)):
            return _eager(Reason.TRAINING_MODE, self._name_where(lambda module: module.training))
        if any(self._hooks) or any(getattr(_module_globals, name) for name in _GLOBAL_HOOKS):
            return _eager(Reason.FORWARD_HOOK, self._name_where(_is_hooked))
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in self._weights):
            return _eager(Reason.GRAD_ENABLED, "weights require grad; call under torch.no_grad()")
        return None

    def is_weight(self, tensor: Tensor) -> bool:
        return id(tensor) in self._weight_ids

    def _scan(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = list(roots.values())
        self._names = {
            module: f"{root}.{name}".rstrip(".")
            for root, top in roots.items()
            for name, module in top.named_modules()
        }
        self._dicts = [vars(module) for module in self._names]
        slots = [held[slot] for held in self._dicts for slot in _SLOTS]
        self._filled = [slot for slot in slots if slot]
        self._empty = [slot for slot in slots if not slot]
        self._hooks = [held[hooks] for held in self._dicts for hooks in _HOOKS]
        self._held = self._hold()
        self._weights = [value for value in self._held if isinstance(value, Tensor)]
        self._weight_ids = set(map(id, self._weights))
        self._addresses = list(map(Tensor.data_ptr, self._weights))
        self._misplaced = self._find_misplaced()

    def _hold(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._filled)))

    def _changed(self) -> bool:
        if any(self._empty) or not _same(self._hold(), self._held):
            return True
        return list(map(Tensor.data_ptr, self._weights)) != self._addresses

    def _find_misplaced(self) -> Outcome | None:
        """Offloaded weights change address, or live where a graph can't read them."""
        for module, name in self._names.items():
            if hasattr(module, "_hf_hook"):
                return _eager(Reason.COMPONENT_OFFLOADED, f"{name} has an offload hook")
            for label, weight in chain(module._parameters.items(), module._buffers.items()):
                if weight is not None and weight.device != self._device:
                    return _eager(Reason.COMPONENT_OFFLOADED, f"{name}.{label} is on {weight.device}")
        return None

    def _name_where(self, holds: Callable[[nn.Module], bool]) -> str:
        return next((name for module, name in self._names.items() if holds(module)), "all modules")


def _is_hooked(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _same(new: list[Any], old: list[Any]) -> bool:
    """Element by element the same objects."""
    return len(new) == len(old) and all(map(operator.is_, new, old))


def _eager(reason: Reason, detail: str) -> Outcome:
    return Outcome(Kind.EAGER, reason, detail)
