"""Fusion sites: ordinary functions a model calls where a fused kernel may stand in.

Outside a `fusion_scope` each is its plain expression from `accel.fusion.references`. Inside, the
site's gate runs the kernel if it is proven to give the same bits, else the plain expression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel.fusion import references, registry
from accel.fusion.scope import current_scope
from accel.record import Reason, SiteOutcome

T = TypeVar("T")


def modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale) * normed + shift, rounded to the storage dtype after each operation.

    normed: (B, L, D), usually a LayerNorm's output. shift, scale: (B, 1, D) or per token (B, L, D).
    Returns (B, L, D), dtype of the arguments. Source: fusion spec section 2, modulate A.
    """
    return _call(references.modulate, normed, shift, scale)


def swiglu(packed: Tensor) -> Tensor:
    """silu(packed[..., :F]) * packed[..., F:], rounded after each of the two.

    packed: (B, L, 2F), any row stride, last stride 1; or contiguous (..., 2F).
    Returns (B, L, F) or (..., F), contiguous.
    Source: fusion spec section 2, SwiGLU packed.
    """
    return _call(references.swiglu, packed)


def gated_residual(x: Tensor, gate: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
    """x + gate * (a + b), rounded after each operation; without b, x + gate * a.

    x, a, b: (B, L, D). gate: (B, 1, D) or per token (B, L, D). Returns (B, L, D).
    Source: fusion spec section 2, gated and two-branch residual.
    """
    return _call(references.gated_residual, x, gate, a, b)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, cos_sin: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """RMS norm of every head of q and k, times scale, then interleaved rotary embedding.

    q, k: (B, L, H, d), strided views of a packed projection are fine. q_scale, k_scale: (d,), dtype
    of q. cos_sin: (B, L, d) fp32, [cos | sin] of d/2 each; pair j turns channels 2j and 2j+1.
    Statistics, normalising product and rotation are fp32; the value is rounded to the dtype of q
    after the norm, after the scale and after the rotation.
    Returns contiguous (q, k), each (B, L, H, d). Source: fusion spec sections 2 and 3.3.
    """
    return _call(references.qk_norm_rope, q, k, q_scale, k_scale, cos_sin, eps)


def _call(reference: Callable[..., T], *args: Any) -> T:
    # A compiler must see the plain expression, and cannot trace a context variable.
    if torch.compiler.is_compiling() or (scope := current_scope()) is None:
        return reference(*args)
    name = reference.__name__
    value: T
    if name in scope.allowed:
        value, outcome = registry.gate(name).run(*args)
    else:
        value, outcome = reference(*args), SiteOutcome(name, False, Reason.DISABLED)
    scope.observe(outcome)
    return value
