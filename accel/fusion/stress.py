"""Arguments that reach the corners of the number format.

A first call with benign data says nothing about overflow, subnormals, signed zeros or NaN, so a
candidate must also agree on these before it is trusted (fusion spec section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

_ROWS = 64


def first_rows(*args: Any) -> tuple[Any, ...]:
    """The arguments with (B, L, ...) tensors cut to a short piece of the sequence, strides kept."""
    return tuple(
        arg.narrow(1, 0, min(arg.shape[1], _ROWS)) if isinstance(arg, Tensor) and arg.dim() >= 3 else arg
        for arg in args
    )


def stress_calls(args: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield argument tuples of the same dtypes, shapes and strides with stressful values.

    Tensors of integers stay as they are.

    Rows of one tensor cycle through all patterns; every round shifts tensors against each other, so
    that patterns meet in many combinations. The global random state is left alone.
    """
    generators: dict[torch.device, Generator] = {}
    for round_ in range(len(_PATTERNS)):
        yield tuple(
            _stressed(arg, start=round_ * (position + 1) + position, generators=generators)
            if isinstance(arg, Tensor) and arg.is_floating_point()
            else arg
            for position, arg in enumerate(args)
        )


def _stressed(tensor: Tensor, *, start: int, generators: dict[torch.device, Generator]) -> Tensor:
    generator = generators.get(tensor.device)
    if generator is None:
        generator = generators[tensor.device] = Generator(tensor.device).manual_seed(0)
    width = tensor.shape[-1] if tensor.dim() else 1
    values = torch.empty(tensor.numel() // max(width, 1), width, device=tensor.device)
    for offset, pattern in enumerate(_PATTERNS):
        rows = values[(offset - start) % len(_PATTERNS) :: len(_PATTERNS)]
        noise = torch.randn(rows.shape, generator=generator, device=tensor.device)
        rows.copy_(pattern(noise, torch.finfo(tensor.dtype)))
    return _like(tensor, values.reshape(tensor.shape))


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """`values` with the strides and alignment class of `tensor`."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    storage = torch.zeros(offset + span, dtype=tensor.dtype, device=tensor.device)
    copy = storage.as_strided(tensor.shape, tensor.stride(), offset)
    distinct(copy).copy_(distinct(values.to(tensor.dtype), like=tensor))
    return copy


def distinct(tensor: Tensor, *, like: Tensor | None = None) -> Tensor:
    """`tensor` without the repetitions that stride 0 makes in `like` (by default in itself)."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _one_hot(noise: Tensor, _: torch.finfo) -> Tensor:
    return torch.zeros_like(noise).scatter_(-1, noise.argmax(-1, keepdim=True), 1.0)


_PATTERNS: tuple[Callable[[Tensor, torch.finfo], Tensor], ...] = (
    lambda noise, _: noise,
    lambda noise, _: noise * 1e-3,
    lambda noise, _: noise * 1e3,
    lambda noise, _: torch.zeros_like(noise),
    lambda noise, _: noise.sign() * 0.0,
    lambda noise, info: noise * info.tiny,
    lambda noise, info: noise.sign() * info.max,
    lambda noise, _: torch.where(noise > 1, noise.sign() * torch.inf, noise),
    lambda noise, _: torch.where(noise < -1, -torch.inf, noise),
    lambda noise, _: torch.where(noise > 1, torch.nan, noise),
    lambda noise, _: noise[..., :1].expand_as(noise),
    _one_hot,
)
