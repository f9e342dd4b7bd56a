"""Fusion sites: ordinary functions a model calls where a fused kernel may stand in.

Outside a `fusion_scope` each is its plain expression from `accel.fusion.references`. Inside, the
site's gate runs the kernel if it is proven to give the same bits. Where the kernel may not run, a large
site falls back to the smaller sites that it is made of.

Shapes: B batch, L tokens, D width, H heads, d channels of a head, S segments. Shifts, scales and gates
are (B, 1, D), one row for all tokens, or (B, L, D), one per token; where `Rows` are taken also one per
segment. Source: fusion spec section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.fusion import references, registry
from accel.fusion.scope import current_scope
from accel.fusion.segments import Rows, split_rows, token_rows
from accel.record import Reason, SiteOutcome

T = TypeVar("T")


def modulate(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale) * normed + shift, rounded to the storage dtype after each operation.

    normed: (B, L, D), a norm's output. Returns (B, L, D), dtype of the arguments.
    """
    return _call(references.modulate, normed, shift, scale)


def gated_residual(x: Tensor, gate: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
    """x + gate * (a + b), rounded after each operation; without b, x + gate * a.

    x, a, b: (B, L, D). Returns (B, L, D).
    """
    return _call(references.gated_residual, x, gate, a, b)


def layer_norm_modulate(x: Tensor, shift: Rows, scale: Rows, *, eps: float = 1e-6) -> Tensor:
    """LayerNorm without affine over D, then `modulate`. x: (B, L, D). Returns (B, L, D)."""

    def parts(*_: Any) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:], eps=eps)
        return modulate(normed, token_rows(shift), token_rows(scale))

    rows, segment = split_rows(shift, scale)
    return _call(references.layer_norm_modulate, x, *rows, segment, eps, fallback=parts)


def residual_layer_norm_modulate(
    x: Tensor,
    gate: Rows,
    a: Tensor,
    b: Tensor | None,
    shift: Rows,
    scale: Rows,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """`gated_residual` and the `layer_norm_modulate` that follows. Returns both, each (B, L, D)."""

    def parts(*_: Any) -> tuple[Tensor, Tensor]:
        residual = gated_residual(x, token_rows(gate), a, b)
        return residual, layer_norm_modulate(residual, shift, scale, eps=eps)

    rows, segment = split_rows(gate, shift, scale)
    return _call(
        references.residual_layer_norm_modulate, x, rows[0], a, b, *rows[1:], segment, eps, fallback=parts
    )


def rms_norm_modulate(
    x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """RMS norm without weight over D, statistics in fp32, then `modulate` if shift and scale are given.

    x: (B, L, D). Returns (B, L, D). Source of the reduction's order: fusion spec section 3.3.
    """
    return _call(references.rms_norm_modulate, x, shift, scale, eps)


def residual_rms_norm_modulate(
    x: Tensor,
    gate: Tensor | None,
    branch: Tensor,
    *modulations: tuple[Tensor, Tensor],
    eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """x + gate * branch and its `rms_norm_modulate`, for up to two modulations (shift, scale) of one norm.

    x, branch: (B, L, D). gate: `None` for a plain sum.
    Returns the sum and one tensor per modulation (the norm itself if there is none), each (B, L, D).
    Raises: ValueError for more modulations.
    """

    def parts(
        x: Tensor,
        gate: Tensor | None,
        branch: Tensor,
        shift: Tensor | None,
        scale: Tensor | None,
        shift2: Tensor | None,
        scale2: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, ...]:
        x = x + branch if gate is None else gated_residual(x, gate, branch)
        if shift2 is None or scale2 is None:
            return x, rms_norm_modulate(x, shift, scale, eps=eps)
        assert shift is not None
        assert scale is not None
        normed = rms_norm_modulate(x, eps=eps)
        return x, modulate(normed, shift, scale), modulate(normed, shift2, scale2)

    two: list[tuple[Tensor | None, Tensor | None]]
    two = [*modulations, *[(None, None)] * (2 - len(modulations))]
    (shift, scale), (shift2, scale2) = two
    return _call(
        references.residual_rms_norm_modulate,
        x,
        gate,
        branch,
        shift,
        scale,
        shift2,
        scale2,
        eps,
        fallback=parts,
    )


def qk_norm_rope(
    q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, cos_sin: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """RMS norm of every head of q and k, times scale, then interleaved rotary embedding (FLUX 3).

    q, k: (B, L, H, d), strided views of a packed projection are fine. q_scale, k_scale: (d,), dtype
    of q. cos_sin: (B, L, d) fp32, [cos | sin] of d/2 each; pair j turns channels 2j and 2j+1.
    Statistics, normalising product and rotation are fp32; the value is rounded to the dtype of q
    after the norm, after the scale and after the rotation.
    Returns contiguous (q, k), each (B, L, H, d). Source: fusion spec sections 2 and 3.3.
    """
    return _call(references.qk_norm_rope, q, k, q_scale, k_scale, cos_sin, eps)


def joint_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    first: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`torch.nn.RMSNorm` of every head of q and k, then interleaved rotary embedding (FLUX.2).

    q, k: (B, L, H, d), strided views are fine. q_scale, k_scale: (d,), dtype of q.
    first: the q, k, q_scale and k_scale of tokens that go before these, (B, L1, H, d).
    cos, sin: fp32 (L1 + L, d), every angle twice. The value is rounded after the norm, weight included,
    and after the rotation, whose products are fp32.
    Returns contiguous (q, k), each (B, L1 + L, H, d). Source: fusion spec sections 2 and 3.2.
    """
    return _call(references.joint_qk_norm_rope, q, k, q_scale, k_scale, cos, sin, eps, *(first or ()))


def qk_norm_split_rope(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cos: Tensor | None = None,
    k_sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """`torch.nn.RMSNorm` of q and k over all heads, then split rotary embedding (LTX-2).

    q: (B, Lq, H * d). k: (B, Lk, H * d). q_scale, k_scale: (H * d,), dtype of q. cos, sin: fp32
    (B, H, Lq, d / 2), for q and, unless k_cos and k_sin (B, H, Lk, d / 2) are given, for k.
    Channel j of a head turns with channel j + d / 2: product rounded to fp32, then a fused multiply-add.
    Returns contiguous (q, k). Source: fusion spec sections 2 and 3.2.
    """
    return _call(references.qk_norm_split_rope, q, k, q_scale, k_scale, cos, sin, k_cos, k_sin, eps)


def swiglu(packed: Tensor) -> Tensor:
    """silu(packed[..., :F]) * packed[..., F:], rounded after each of the two.

    packed: (B, L, 2F), any row stride, last stride 1; or contiguous (..., 2F).
    Returns (B, L, F) or (..., F), contiguous.
    """
    return _call(references.swiglu, packed)


def swiglu_concat(first: Tensor, packed: Tensor) -> Tensor:
    """[first | swiglu(packed)]: the input of an output projection that attention and MLP share.

    first: (B, L, D). packed: (B, L, 2F). Any row strides, last stride 1. Returns (B, L, D + F).
    """
    return _call(
        references.swiglu_concat,
        first,
        packed,
        fallback=lambda first, packed: torch.cat([first, swiglu(packed)], dim=-1),
    )


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension: x ~ values * scale[..., None].

    x: floating (..., K). Returns float8_e4m3fn (..., K), rounded to nearest even, and fp32 (...).
    """
    return _call(references.quantize_rows, x)


def swiglu_quantize_rows(packed: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `swiglu`. packed: (..., 2F). Returns float8_e4m3fn (..., F) and fp32 (...)."""
    return _call(
        references.swiglu_quantize_rows, packed, fallback=lambda packed: quantize_rows(swiglu(packed))
    )


def guided_euler_step(
    sample: Tensor, cond: Tensor, uncond: Tensor | None, *, guidance: float, delta: Tensor
) -> Tensor:
    """One Euler step of flow matching with classifier-free guidance.

    sample, cond, uncond: same shape. uncond: `None` without guidance. delta: fp32 scalar on the device, the
    difference of noise levels; multiplying by it follows torch's rule for such scalars.
    Returns the next sample in the dtype of cond.
    """
    return _call(references.guided_euler_step, sample, cond, uncond, guidance, delta)


def group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, *, eps: float = 1e-6) -> Tensor:
    """silu(group_norm(x)). x: (B, C, H, W). weight, bias: (C,). Source: fusion spec section 3.4."""
    return _call(references.group_norm_silu, x, groups, weight, bias, eps)


def channel_norm_silu(x: Tensor, *, eps: float = 1e-8) -> Tensor:
    """silu of x over its root mean square along dimension 1. x: (B, C, T, H, W)."""
    return _call(references.channel_norm_silu, x, eps)


def _call(reference: Callable[..., T], *args: Any, fallback: Callable[..., T] | None = None) -> T:
    """The value of a site whose plain expression is `reference`.

    fallback: the same bits by smaller sites, where the kernel of this one may not run.
    """
    otherwise = fallback or reference
    # A compiler must see the plain expression, and cannot trace a context variable.
    if torch.compiler.is_compiling() or (scope := current_scope()) is None:
        return otherwise(*args)
    name = reference.__name__
    value: T
    if name in scope.allowed:
        value, outcome = registry.gate(name).run(*args, fallback=otherwise)
    else:
        value, outcome = otherwise(*args), SiteOutcome(name, False, Reason.DISABLED)
    scope.observe(outcome)
    return value
