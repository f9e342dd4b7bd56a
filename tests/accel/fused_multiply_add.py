"""What a GPU computes in one instruction, for models of CUDA's arithmetic in plain torch."""

from torch import Tensor


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z rounded once to fp32, but for sums that fp64 rounds to a tie."""
    return (x.double() * y.double() + z.double()).float()
