"""What must match for a captured graph to stand in for a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from accel.graphs.tree import Constant, Key, TensorKey, argument_name, leaf_names


class Environment(NamedTuple):
    """Process-wide switches that choose kernels or insert casts."""

    inference_mode: bool
    default_dtype: torch.dtype
    autocast: tuple[bool, torch.dtype]
    matmul_precision: tuple[str, str]
    convolution_precision: str
    reduced_precision_reduction: tuple[Any, ...]
    cudnn: tuple[bool, bool, bool]
    deterministic_algorithms: tuple[bool, bool]
    attention_kernels: tuple[bool, ...]
    attention_priority: tuple[int, ...]
    blas_library: str

    @classmethod
    def current(cls, device_type: str) -> Environment:
        """Read the switches as they are now."""
        cudnn = torch.backends.cudnn
        return cls(
            inference_mode=torch.is_inference_mode_enabled(),
            default_dtype=torch.get_default_dtype(),
            autocast=(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)),
            matmul_precision=(
                torch.get_float32_matmul_precision(),
                torch._C._get_fp32_precision_getter("cuda", "matmul"),
            ),
            convolution_precision=torch._C._get_fp32_precision_getter("cuda", "conv"),
            reduced_precision_reduction=(
                torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
                torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
                torch._C._get_cublas_allow_fp16_accumulation(),
            ),
            cudnn=(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
            deterministic_algorithms=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            attention_kernels=(
                torch._C._get_flash_sdp_enabled(),
                torch._C._get_mem_efficient_sdp_enabled(),
                torch._C._get_math_sdp_enabled(),
                torch._C._get_cudnn_sdp_enabled(),
            ),
            attention_priority=tuple(torch._C._get_sdp_priority_order()),
            blas_library=str(torch._C._get_blas_preferred_backend()),
        )


class Signature(NamedTuple):
    """Everything that decides which graph may serve a call.

    arguments: a `Node` of the bound arguments by name. fused: sites allowed to fuse.
    Weights and the state of the fusion gates count as well: a change of either drops all graphs
    (see `WholeGraph`), so that they need no place here.
    """

    arguments: Key
    environment: Environment
    fused: frozenset[str]


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
    return f"{_describe(new)} vs {_describe(old)}"


def _describe(leaf: TensorKey | Constant) -> str:
    if isinstance(leaf, TensorKey):
        return f"tensor {tuple(leaf.shape)}"
    if leaf.kind is float:
        return repr(float.fromhex(str(leaf.value)))
    return repr(leaf.value)
