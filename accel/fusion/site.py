"""What a fusion site and its kernel are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Tier = Literal["exact"]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A fused candidate for a site.

    plan: takes what the site's reference takes; returns a function for such calls that does what the
        reference does. Layouts, and arguments that are not tensors, are settled in it; it keeps no tensor.
    refuses: what in the arguments the kernel cannot serve, in words; empty when it can. Looks at
        shapes, strides, dtypes and alignment alone.
    shorten: the arguments cut to what is worth running on stress vectors; by default as they are.
    proof: arguments that hold every encoding of a 16-bit dtype, made for (dtype, device); for sites
        that apply a function of one variable.
    """

    plan: Callable[..., Callable[..., Any]]
    refuses: Callable[..., str] = lambda *_: ""
    shorten: Callable[..., tuple[Any, ...]] = lambda *args: args
    proof: Callable[[torch.dtype, torch.device], tuple[Any, ...]] | None = None

    def run(self, *args: Any) -> Any:
        """The value of one call."""
        return self.plan(*args)(*args)


@dataclass(frozen=True, kw_only=True)
class Site:
    """One entry of the allowlist.

    tier: `exact` has the bits of the reference, which the gate enforces.
    load: imports and returns the kernel; raises ImportError where Triton is missing.
    dtypes, devices: of the first argument. dims: supported sizes, in words.
    evidence: what has been proven, on which device and versions.
    """

    name: str
    reference: Callable[..., Any]
    load: Callable[[], Kernel]
    dtypes: tuple[torch.dtype, ...]
    dims: str = "any"
    devices: tuple[str, ...] = ("cuda",)
    evidence: str = ""
    tier: Tier = "exact"

    def refuses(self, tensors: Sequence[Tensor]) -> str:
        """Why no kernel of this site can take these tensors; empty if one can."""
        first = tensors[0]
        if first.dtype not in self.dtypes:
            return f"dtype {first.dtype}"
        for tensor in tensors:
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                return f"tensor subclass {type(tensor).__name__}"
            if tensor.device != first.device:
                return f"tensors on {first.device} and {tensor.device}"
            if tensor.numel() == 0:
                return "empty tensor"
        return ""
