"""Row-wise FP8 linears (spec section 12): E4M3 values with one fp32 scale per row."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
MIN_ROWS = 16  # fewer rows than one tile of the tensor cores are refused by the matmul
NATIVE_CAPABILITIES = frozenset({(8, 9), (9, 0), (10, 0), (10, 3), (12, 0)})


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension: x ~ values * scale[..., None].

    x: floating (..., K). Returns float8_e4m3fn (..., K), rounded to nearest even, and fp32 (...).
    """
    wide = x.float()
    scale = (wide.abs().amax(dim=-1) / E4M3_MAX).clamp_min(SMALLEST_SCALE)
    values = (wide / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn), scale


class Fp8Linear(nn.Module):
    """x @ (weight * weight_scale[:, None]).T with x quantised per token on the fly.

    weight: float8_e4m3fn (out, in). weight_scale: fp32 (out,). Neither is initialised.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out_features, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out) in x's dtype, accumulated in fp32."""
        rows = x.flatten(0, -2)
        product = scaled_product if _has_native_product(x, self.weight) else dequantized_product
        return product(rows, self.weight, self.weight_scale).view(*x.shape[:-1], -1)


def scaled_product(rows: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Product on FP8 tensor cores. rows: bf16 (M, in) -> bf16 (M, out)."""
    count = rows.shape[0]
    values, scale = quantize_rows(F.pad(rows, (0, 0, 0, max(0, MIN_ROWS - count))))
    product = torch._scaled_mm(
        values,
        weight.T,
        scale.unsqueeze(1),
        weight_scale.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product[:count]


def dequantized_product(rows: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The same numbers from an fp32 matmul, for devices without FP8. (M, in) -> (M, out), rows' dtype."""
    values, scale = quantize_rows(rows)
    product = values.float() @ weight.float().T
    return (product * scale.unsqueeze(1) * weight_scale).to(rows.dtype)


def _has_native_product(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and all(size % 16 == 0 for size in weight.shape)
        and _capability(x.device) in NATIVE_CAPABILITIES
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
