"""Seeded random weights for any module: outputs mean nothing; shapes, speed and bits are a real run's."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn


def fill(module: nn.Module, *, seed: int) -> None:
    """Draw every parameter in place; buffers stay as the class defines them.

    Matrices and kernels are normal with variance 1 / fan-in (a standard deviation near 0.02 at the
    released widths), which keeps activations finite in bf16 at any depth; biases are small; other
    vectors, the weights of norms, lie around 1. Each parameter depends on (seed, its name, its shape)
    and the device alone.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            generator = torch.Generator(parameter.device).manual_seed(_stable_seed(seed, name))
            parameter.copy_(_values(name, parameter, generator))


def _values(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 values of the parameter's shape."""
    noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
    if parameter.ndim > 1:
        return noise.mul_(1 / math.sqrt(math.prod(parameter.shape[1:])))
    return noise.mul_(0.02) if name.endswith("bias") else noise.mul_(0.1).add_(1)


def _stable_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch takes 63 bits on every device
