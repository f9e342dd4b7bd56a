"""Watches the modules behind a stage: whether their weights moved, and whether graphs may run at all."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module_globals
from torch.overrides import TorchFunctionMode

from accel.forward_hooks import FORWARD_HOOK_SLOTS, has_forward_hooks
from accel.record import Kind, Outcome, Reason

_SLOTS = ("_parameters", "_buffers", "_modules")
# What layers of PEFT read in Python: graphs hold the values that these had.
_ADAPTER_STATE = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")

# Compares addresses in one call; builds of torch without CUDA lack it.
_ADDRESSES_EQUAL = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
_IS_TRAINING = operator.itemgetter("training")


class ModuleWatch:
    """Per-call checks of a stage's modules. Each is one pass in C: there may be hundreds of modules.

    epoch: grows when a parameter, buffer or submodule is replaced, added or removed, or its data moves, and
    when adapters (LoRA) are scaled, chosen, switched off or merged.
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
        hooked_or_filled = any(self._expected_empty)
        if self._changed(list(roots.values()), hooked_or_filled) or not self._in_place():
            self.epoch += 1
            self._scan(roots)
        if self._misplaced is not None:
            return self._misplaced
        if any(map(_IS_TRAINING, self._dicts)):
            return _eager(Reason.TRAINING_MODE, self._name_where(lambda module: module.training))
        if (hooked_or_filled and any(self._hooks)) or any(_global_hooks()):
            return _eager(Reason.FORWARD_HOOK, self._name_where(has_forward_hooks))
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in self._weights):
            return _eager(Reason.GRAD_ENABLED, "weights require grad; call under torch.no_grad()")
        return None

    def is_weight(self, tensor: Tensor) -> bool:
        return id(tensor) in self._weight_ids

    def memory(self) -> list[torch.UntypedStorage]:
        """Where the weights lie. Whoever keeps this keeps the memory, wherever the weights move."""
        return [weight.untyped_storage() for weight in self._weights]

    def _in_place(self) -> bool:
        """Whether the weights lie where they were at the last scan."""
        if _ADDRESSES_EQUAL is None:
            return self._current_addresses() == self._addresses
        return bool(_ADDRESSES_EQUAL(self._weights, self._addresses, self._every_weight))

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
        self._as_scanned = [dict(slot) for slot in self._filled]
        self._empty = [slot for slot in slots if not slot]
        self._hooks = [held[slot] for held in self._dicts for slot in FORWARD_HOOK_SLOTS]
        self._expected_empty = self._empty + self._hooks
        self._adapted = [module for module in self._names if hasattr(module, "_active_adapter")]
        self._adapters = self._current_adapters()
        values = chain.from_iterable(slot.values() for slot in self._filled)
        weights = {id(value): value for value in values if isinstance(value, Tensor)}
        self._weight_ids = weights.keys()
        self._weights = list(weights.values())
        self._addresses = self._current_addresses()
        self._every_weight = list(range(len(self._weights)))
        self._misplaced = self._find_misplaced()

    def _changed(self, roots: list[nn.Module], hooked_or_filled: bool) -> bool:
        if not _same([roots, self._filled], [self._roots, self._as_scanned]):
            return True
        if self._adapted and not _same(self._current_adapters(), self._adapters):
            return True
        return hooked_or_filled and any(self._empty)

    def _current_adapters(self) -> list[Any]:
        return [copy.copy(getattr(layer, name, None)) for layer in self._adapted for name in _ADAPTER_STATE]

    def _current_addresses(self) -> list[int]:
        with torch._C.DisableTorchFunction():  # else `with torch.device(...)` would see every call
            return list(map(Tensor.data_ptr, self._weights))

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


def _global_hooks() -> list[Any]:
    return [_module_globals._global_forward_hooks, _module_globals._global_forward_pre_hooks]


class _NoComparison(TorchFunctionMode):
    """Raises where two tensors are compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("tensors are compared by identity here")


def _same(new: list[Any], old: list[Any]) -> bool:
    """Whether both hold the same objects, at any depth of lists and dicts.

    `==` of containers takes identical elements as equal without asking them. Modules that are not
    identical are unequal, and tensors that are not end the comparison.
    """
    try:
        with _NoComparison():
            return new == old
    except RuntimeError:
        return False


def _eager(reason: Reason, detail: str) -> Outcome:
    return Outcome(Kind.EAGER, reason, detail)
