"""Kernel arithmetic and addressing under the Triton interpreter, against CPU eager.

Bits of exp, rsqrt and reductions are only settled on a GPU (tests/gpu/test_kernels_gpu.py).
"""

import json
from pathlib import Path

import pytest
import torch

from accel.fusion import references
from accel.fusion.compare import first_mismatch
from accel.fusion.stress import stress_calls

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
C10 = json.loads((Path(__file__).parents[1] / "cases" / "C10_modulate_triples.json").read_text())


def bf16(bits):
    return torch.tensor(int(bits, 16), dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("row", C10["rows"], ids=lambda row: row["expect_bits"])
def test_c10_modulate_rounds_after_every_operation(kernels, row):
    x, scale, shift, expect = (
        bf16(row[name]) for name in ("x_bits", "scale_bits", "shift_bits", "expect_bits")
    )
    tiled = [value.repeat(1, 257, 384) for value in (x, shift, scale)]
    expected = expect.repeat(1, 257, 384)
    assert first_mismatch(expected, references.modulate(*tiled)) is None
    few = [value[:, :5].contiguous() for value in tiled]
    assert first_mismatch(expected[:, :5].contiguous(), kernels["modulate"].run(*few)) is None


def test_c10_float32_product_is_rounded_before_the_sum(kernels):
    pair = C10["fp32_fma"]
    a, c = (torch.full((1, 3, 384), pair[name]) for name in "ac")
    assert torch.equal(kernels["modulate"].run(a, c, a - 1), torch.full_like(a, pair["expect"]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_token", [False, True], ids=["broadcast", "per token"])
def test_modulate(kernels, assert_equals_eager, dtype, per_token):
    normed = torch.randn(2, 5, 70).to(dtype)
    shift, scale = torch.randn(2, 5 if per_token else 1, 140).to(dtype).chunk(2, dim=-1)
    assert_equals_eager(kernels["modulate"], references.modulate, normed, shift, scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_residual(kernels, assert_equals_eager, dtype):
    x, a, b = torch.randn(3, 2, 5, 1100).to(dtype)
    gate = torch.randn(2, 1, 3300).to(dtype).chunk(3, dim=-1)[2]
    for args in ((x, gate, a, b), (x, gate.expand(2, 5, -1), a, b), (x, gate, a, None)):
        assert_equals_eager(kernels["gated_residual"], references.gated_residual, *args)


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflow_subnormals_signed_zeros_and_nan(kernels, assert_equals_eager, dtype):
    x, vector = torch.zeros(1, 20, 64).to(dtype), torch.zeros(1, 1, 64).to(dtype)
    for call in stress_calls((x, vector, vector)):
        assert_equals_eager(kernels["modulate"], references.modulate, *call)
    for call in stress_calls((x, vector, x, x)):
        assert_equals_eager(kernels["gated_residual"], references.gated_residual, *call)


def test_swiglu_reads_a_slice_of_the_projection(kernels, assert_equals_eager):
    projection = torch.randn(2, 4, 3000).bfloat16()
    assert_equals_eager(kernels["swiglu"], references.swiglu, projection[..., 960:])


def test_swiglu_on_every_encoding(kernels):
    """CPU and NumPy exp differ in the last fp32 digit, which no normal bf16 result shows."""
    (packed,) = kernels["swiglu"].proof(torch.bfloat16, torch.device("cpu"))
    expected, actual = references.swiglu(packed), kernels["swiglu"].run(packed)
    normal = expected.abs() >= torch.finfo(torch.bfloat16).tiny
    assert torch.equal(expected[normal], actual[normal])
    assert torch.equal(expected.isnan(), actual.isnan())


def aten_mean_of_squares(x):
    """fp32 mean over 128 in the order of fusion spec section 3.3."""
    squares = x.float().pow(2).unflatten(-1, (32, 4))
    lanes = ((squares[..., 0] + squares[..., 1]) + squares[..., 2]) + squares[..., 3]
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes[..., :distance] + lanes[..., distance:]
    return lanes * (1.0 / 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_qk_norm_rope_on_a_packed_projection(kernels, dtype):
    projection = torch.randn(2, 3, 3 * 9 * 128 + 64).to(dtype)
    q, k, _ = (part.unflatten(-1, (9, 128)) for part in projection[..., : 3 * 9 * 128].chunk(3, dim=-1))
    q_scale, k_scale = torch.randn(2, 128).to(dtype)
    cos_sin = torch.randn(1, 3, 128)
    assert kernels["qk_norm_rope"].refuses(q, k, q_scale, k_scale, cos_sin, 1e-6) == ""
    got = kernels["qk_norm_rope"].run(q, k, q_scale, k_scale, cos_sin, 1e-6)
    cos, sin = cos_sin.unsqueeze(2).chunk(2, dim=-1)
    for x, scale, actual in ((q, q_scale, got[0]), (k, k_scale, got[1])):
        normed = (x.float() * torch.rsqrt(aten_mean_of_squares(x) + 1e-6)).to(dtype) * scale
        mismatch = first_mismatch(references._rotate_pairs(normed, cos, sin), actual)
        assert mismatch is None, str(mismatch)


def test_c12_modulate_with_every_layout(kernels, assert_equals_eager):
    """scale 1 and shift 3 make 2x + 3. Layouts that the kernel cannot walk are refused by name."""
    kernel = kernels["modulate"]
    base = torch.arange(48.0).bfloat16().reshape(4, 12)
    flat = torch.arange(25.0).bfloat16()
    packed = torch.cat((torch.full((4, 36), 3.0), torch.ones(4, 36)), dim=-1).bfloat16()
    odd_batch = torch.empty_strided((1, 4, 12), (7, 12, 1), dtype=torch.bfloat16).copy_(base)
    served = {
        "c": base.chunk(6, dim=-1)[1].unsqueeze(0),
        "e": flat[1:].view(1, 4, 6),
        "g": odd_batch,
        "batched rows": base.view(2, 2, 12)[..., 3:9],
    }
    refused = {
        "a": base[None, :, ::2],
        "b": torch.arange(24.0).bfloat16().reshape(6, 4).t().unsqueeze(0),
        "d": torch.arange(48.0).bfloat16().view(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": base[None, :1].expand(1, 4, 12),
        "batch inside": base.view(2, 2, 12).transpose(0, 1),
        "two dimensions": base,
    }
    for x in served.values():
        ones = torch.ones_like(x, memory_format=torch.contiguous_format)
        assert_equals_eager(kernel, references.modulate, x, 3 * ones, ones)
        assert torch.equal(kernel.run(x, 3 * ones, ones), 2 * x + 3)
    for x in refused.values():
        assert kernel.refuses(x, torch.ones_like(x), torch.ones_like(x))
    shift, scale = packed.view(1, 4, 72).chunk(2, dim=-1)  # f
    assert_equals_eager(kernel, references.modulate, base[None], shift[..., :12], scale[..., :12])


def test_refusals_name_the_argument(kernels):
    q = torch.zeros(1, 2, 3, 64)
    assert "(B, L, H, 128)" in kernels["qk_norm_rope"].refuses(q, q, q, q, q, 1e-6)
    x = torch.zeros(1, 2, 8)
    assert "gate" in kernels["gated_residual"].refuses(x, torch.zeros(8), x, x)
    assert "scale: torch.float64" in kernels["modulate"].refuses(x, x, x.double())


def test_integer_rounding_is_nearest_even_everywhere(kernels):
    """Every bf16 number with every kind of remainder: none, below, at and above one half."""
    global tl, store_as  # the interpreter looks names up in the module
    import triton
    import triton.language as tl

    from accel.fusion.kernels.rounding import store_as

    @triton.jit
    def round_all(out, x, block: tl.constexpr):
        index = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(out + index, store_as(tl.load(x + index), tl.bfloat16))

    upper = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    remainders = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper | remainders).flatten()
    x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    round_all[(x.numel() // 4096,)](out, x, block=4096)
    assert first_mismatch(x.bfloat16(), out) is None
