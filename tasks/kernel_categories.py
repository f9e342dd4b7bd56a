"""What kind of work a kernel or operator does, told from its name."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

Category = Literal[
    "matmul", "attention", "convolution", "norm", "elementwise", "copy", "reduction", "ours", "other"
]

# First match wins: an attention kernel may be built from GEMM parts, a convolution may be an implicit GEMM,
# a copy is an elementwise kernel with the identity as its function.
_PATTERNS: tuple[tuple[Category, str], ...] = (
    ("attention", r"flash|fmha|attention|attn|sdpa|natten"),
    ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|im2col|vol2col|nchwto|nhwcto"),
    ("norm", r"layer_?norm|rms_?norm|group_?norm|batch_?norm|instance_?norm|rowwisemoments|vector_norm"),
    ("matmul", r"gemm|gemv|cutlass|cublas|nvjet|splitk|scaled_mm|matmul|::(mm|bmm|addmm|baddbmm|linear)$"),
    (
        "copy",
        r"memcpy|memset|copy|cat(array|$)|::(cat|stack|contiguous|clone|to|_to_copy|fill_|zero_)$"
        r"|fill|transpose_|gather|scatter|index_?select|index_elementwise|::index$|embedding|arange|roll_",
    ),
    ("reduction", r"reduce|softmax|cumsum|scan|argm(ax|in)|::(sum|mean|amax|amin|max|min|any|all|var|std)$"),
    (
        "elementwise",
        r"elementwise|pointwise|::(add|sub|rsub|mul|div|neg|exp|pow|sqrt|rsqrt|reciprocal|sin|cos|silu|gelu"
        r"|sigmoid|tanh|relu|clamp|where|abs|round|floor|ceil|lerp|maximum|minimum|addcmul|leaky_relu|snake"
        r"|eq|ne|lt|le|gt|ge|logical_and|logical_not|bitwise_and|bitwise_not)_?$",
    ),
)
_COMPILED = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in _PATTERNS)


def category_of(name: str, *, ours: Collection[str] = ()) -> Category:
    """name: as the profiler shows it. ours: names of the fused kernels of `accel.fusion`."""
    if name in ours:
        return "ours"
    return next((category for category, pattern in _COMPILED if pattern.search(name)), "other")


def short_name(name: str, *, width: int = 60) -> str:
    """A kernel's name for a table: without return type, namespaces and arguments, cut to `width`."""
    bare = re.sub(r"\(anonymous namespace\)::|\b(void|at|native|c10|cuda|detail|std)(::| )", "", name)
    bare = bare.partition("(")[0] if bare.endswith(")") and not bare.startswith("Mem") else bare
    return bare if len(bare) <= width else bare[: width - 3] + "..."
