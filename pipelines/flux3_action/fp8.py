"""Row-wise FP8 linears (spec section 12): E4M3 values with one fp32 scale per row."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.fusion import quantize_rows, swiglu_quantize_rows

MIN_ROWS = 16  # fewer rows than one tile of the tensor cores are refused by the matmul
NATIVE_CAPABILITIES = frozenset({(8, 9), (9, 0), (10, 0), (10, 3), (12, 0)})


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
        return self._product(*quantize_rows(x), x.dtype)

    def after_swiglu(self, packed: Tensor) -> Tensor:
        """The value at swiglu(packed), which is quantised while it is made. packed: (..., 2 * in)."""
        return self._product(*swiglu_quantize_rows(packed), packed.dtype)

    def _product(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        product = scaled_product if _has_native_product(dtype, self.weight) else dequantized_product
        rows = product(values.flatten(0, -2), scale.flatten(), self.weight, self.weight_scale)
        return rows.to(dtype).view(*values.shape[:-1], -1)


def scaled_product(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Product on FP8 tensor cores. values: float8_e4m3fn (M, in), scale: fp32 (M,) -> bf16 (M, out)."""
    count = values.shape[0]
    if count < MIN_ROWS:
        missing = MIN_ROWS - count
        values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)
        scale = F.pad(scale, (0, missing))
    product = torch._scaled_mm(
        values,
        weight.T,
        scale.unsqueeze(1),
        weight_scale.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product[:count]


def dequantized_product(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The same from an fp32 matmul, for devices without FP8. Arguments as there -> fp32 (M, out)."""
    return (values.float() @ weight.float().T) * scale.unsqueeze(1) * weight_scale


def _has_native_product(dtype: torch.dtype, weight: Tensor) -> bool:
    return (
        weight.is_cuda
        and dtype == torch.bfloat16
        and all(size % 16 == 0 for size in weight.shape)
        and _capability(weight.device) in NATIVE_CAPABILITIES
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
