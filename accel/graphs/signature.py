"""What must match for a captured graph to stand in for a call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from accel.graphs.tree import Constant, Key, Node, TensorKey, argument_name, leaf_names


class Environment(NamedTuple):
    """Process-wide switches that choose kernels, insert casts or place new tensors.

    function_modes: active ones, such as `with torch.device(...)`.
    """

    function_modes: int
    inference_mode: bool
    default_dtype: torch.dtype
    autocast: bool
    autocast_dtype: torch.dtype
    matmul_precision: str
    cuda_matmul_precision: str
    cuda_convolution_precision: str
    fp16_reduced_precision_reduction: Any
    bf16_reduced_precision_reduction: Any
    fp16_accumulation: bool
    cudnn: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    deterministic_algorithms: bool
    deterministic_warn_only: bool
    flash_attention: bool
    efficient_attention: bool
    math_attention: bool
    cudnn_attention: bool
    attention_priority: tuple[int, ...]
    blas_library: Any

    @classmethod
    def current(cls, device_type: str) -> Environment:
        """Read the switches as they are now."""
        c = torch._C
        return cls(
            c._len_torch_function_stack(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            c._get_float32_matmul_precision(),
            c._get_fp32_precision_getter("cuda", "matmul"),
            c._get_fp32_precision_getter("cuda", "conv"),
            c._get_cublas_allow_fp16_reduced_precision_reduction(),
            c._get_cublas_allow_bf16_reduced_precision_reduction(),
            c._get_cublas_allow_fp16_accumulation(),
            c._get_cudnn_enabled(),
            c._get_cudnn_benchmark(),
            c._get_cudnn_deterministic(),
            c._get_deterministic_algorithms(),
            c._get_deterministic_algorithms_warn_only(),
            c._get_flash_sdp_enabled(),
            c._get_mem_efficient_sdp_enabled(),
            c._get_math_sdp_enabled(),
            c._get_cudnn_sdp_enabled(),
            tuple(c._get_sdp_priority_order()),
            c._get_blas_preferred_backend(),
        )


class Signature(NamedTuple):
    """Everything that decides which graph may serve a call.

    arguments: a `Node` of the bound arguments by name, or what `sealed_arguments` gives. fused: sites
    allowed to fuse.
    Weights and the state of the fusion gates count as well: a change of either drops all graphs
    (see `WholeGraph`), so that they need no place here.
    """

    arguments: Key
    environment: Environment
    fused: frozenset[str]


def sealed_arguments(key: Hashable) -> Node:
    """In the place of arguments that a caller vouches for by a key of its own."""
    return Node(dict, (("sealed key", Constant(type(key), key)),), ())


def differences(new: Signature, old: Signature) -> list[str]:
    """In words, e.g. ["latents: shape (1, 17) vs (1, 81)", "g: 0.5 vs 1.0"]; `new` comes first."""
    found = _argument_differences(new.arguments, old.arguments)
    for name, ours, theirs in zip(Environment._fields, new.environment, old.environment, strict=True):
        if ours != theirs:
            found.append(f"{name.replace('_', ' ')}: {ours} vs {theirs}")
    if new.fused != old.fused:
        found.append(f"fused sites: {sorted(new.fused)} vs {sorted(old.fused)}")
    return found


def _argument_differences(new: Key, old: Key) -> list[str]:
    ours, theirs = _named_leaves(new), _named_leaves(old)
    found = []
    for name in ours | theirs:
        if name not in theirs:
            found.append(f"{name}: new")
        elif name not in ours:
            found.append(f"{name}: missing")
        elif ours[name] != theirs[name]:
            found.append(f"{name}: {_leaf_difference(ours[name], theirs[name])}")
    if not found and new != old:
        found.append("container types differ, e.g. a list where a tuple was")
    return found


def _named_leaves(arguments: Key) -> dict[str, TensorKey | Constant]:
    return {argument_name(name): leaf for name, leaf in leaf_names(arguments)}


def _leaf_difference(new: TensorKey | Constant, old: TensorKey | Constant) -> str:
    if isinstance(new, TensorKey) and isinstance(old, TensorKey):
        for field in ("shape", "dtype", "device", "stride", "misalignment"):
            ours, theirs = getattr(new, field), getattr(old, field)
            if ours != theirs:
                # A torch.Size prints its class; a tuple does not.
                ours, theirs = (tuple(v) if isinstance(v, tuple) else v for v in (ours, theirs))
                return f"{field} {ours} vs {theirs}"
        return "the same tensor passed twice, or no longer"
    return f"{describe_leaf(new)} vs {describe_leaf(old)}"


def describe_leaf(leaf: TensorKey | Constant) -> str:
    """E.g. "tensor (1, 17)" or "0.5"."""
    if isinstance(leaf, TensorKey):
        return f"tensor {tuple(leaf.shape)}"
    if leaf.kind is float and isinstance(leaf.value, str):
        return repr(float.fromhex(str(leaf.value)))
    return repr(leaf.value)
