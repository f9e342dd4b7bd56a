"""The norm and rotation of q and k under the Triton interpreter, against ATen's CUDA order in plain torch.

The order of fusion spec section 3.2 is verified on a GPU; CPU eager adds in another one.
"""

import pytest
import torch
import torch.nn.functional as F
from fused_multiply_add import fma

from accel.fusion import references
from accel.fusion.compare import first_mismatch
from accel.fusion.stress import stress_calls

DTYPES = (torch.bfloat16, torch.float16)
EPS = 1e-6


def aten_inverse_rms(x, eps=EPS):
    """(..., N) -> (..., 1) fp32: vectors of four to 128 threads in turn, 32 lanes, four warps."""
    rounds = F.pad(x.float(), (0, -x.shape[-1] % 512)).unflatten(-1, (-1, 128, 4))
    total = torch.zeros((*rounds.shape[:-3], 128))
    for vectors in rounds.unbind(-3):
        for neighbour in vectors.unbind(-1):
            total = fma(neighbour, neighbour, total)
    lanes = total.unflatten(-1, (4, 32))
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes[..., :distance] + lanes[..., distance:]
    first, second, third, fourth = lanes.squeeze(-1).unbind(-1)
    mean = ((first + third) + (second + fourth)) / torch.tensor(float(x.shape[-1]))
    return torch.rsqrt(mean + eps).unsqueeze(-1)


def aten_rms_norm(x, weight, eps=EPS):
    return (weight.float() * (aten_inverse_rms(x, eps) * x.float())).to(x.dtype)


def joint_model(q, k, q_scale, k_scale, cos, sin, eps, *first):
    sources = [(q, k, q_scale, k_scale), first] if first else [(q, k, q_scale, k_scale)]
    q, k = (
        torch.cat([aten_rms_norm(source[i], source[i + 2], eps) for source in reversed(sources)], dim=1)
        for i in range(2)
    )
    cos, sin = cos[None, :, None], sin[None, :, None]
    return references._rotate_interleaved(q, cos, sin), references._rotate_interleaved(k, cos, sin)


def split_model(q, k, q_scale, k_scale, cos, sin, k_cos, k_sin, eps):
    def rotate(x, cos, sin):
        batch, heads, length, half = cos.shape
        halves = x.view(batch, length, heads, 2, half).transpose(1, 2).float()
        first, second = halves.unbind(-2)
        turned = torch.stack((fma(-sin, second, first * cos), fma(sin, first, second * cos)), dim=-2)
        return turned.to(x.dtype).transpose(1, 2).reshape(x.shape)

    k_cos, k_sin = (cos, sin) if k_cos is None else (k_cos, k_sin)
    return (
        rotate(aten_rms_norm(q, q_scale, eps), cos, sin),
        rotate(aten_rms_norm(k, k_scale, eps), k_cos, k_sin),
    )


def assert_equals_model(kernel, model, args):
    assert kernel.refuses(*args) == ""
    mismatch = first_mismatch(model(*args), kernel.run(*args))
    assert mismatch is None, str(mismatch)


def joint_source(dtype, *, batch=2, tokens=3, heads=9):
    """q and k as views of a packed projection, and their weights."""
    projection = torch.randn(batch, tokens, 3 * heads * 128 + 64).to(dtype)
    q, k = (
        projection[..., i * heads * 128 :][..., : heads * 128].unflatten(-1, (heads, 128)) for i in (0, 1)
    )
    return q, k, *torch.randn(2, 128).to(dtype)


def split_source(dtype, *, batch=2, q_tokens=3, k_tokens=3, width=300):
    q, k = (torch.randn(batch, tokens, width).to(dtype) for tokens in (q_tokens, k_tokens))
    return q, k, *torch.randn(2, width).to(dtype)


def angles(batch, heads, tokens, half):
    """cos and sin (B, H, L, d / 2) as the model makes them: views with the heads inside of the tokens."""
    return tuple(torch.randn(2, batch, tokens, heads, half).transpose(2, 3))


@pytest.mark.parametrize("width", [128, 300, 512, 2048, 3072])
def test_inverse_rms_adds_in_the_order_of_aten(kernels, width):
    """In fp32, where another order shows; a bf16 result would hide it."""
    global tl, _inverse_rms  # the interpreter looks names up in the module
    import triton
    import triton.language as tl

    assert kernels["qk_norm_split_rope"]
    from accel.fusion.kernels.qk_norm_split_rope import _inverse_rms

    @triton.jit
    def inverse_rms_of_rows(out, x, eps, width: tl.constexpr):
        row = tl.program_id(0)
        tl.store(out + row, _inverse_rms(x + row * width, eps, width))

    x = torch.randn(8, width) * torch.logspace(-3, 3, width)
    x = x[:, torch.randperm(width)].bfloat16()
    out = torch.empty(8, 1)
    inverse_rms_of_rows[(8,)](out, x, EPS, width=width)
    assert torch.equal(out, aten_inverse_rms(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_joint_sources_with_their_own_strides_and_weights(kernels, dtype):
    source = joint_source(dtype)
    first = (*torch.randn(2, 2, 2, 9, 128).to(dtype), *torch.randn(2, 128).to(dtype))
    cos, sin = torch.randn(5, 256).chunk(2, dim=-1)
    kernel = kernels["joint_qk_norm_rope"]
    assert_equals_model(kernel, joint_model, (*source, cos, sin, EPS, *first))
    assert_equals_model(kernel, joint_model, (*source, cos[:3], sin[:3], EPS))


def test_joint_products_are_rounded_before_they_are_added(kernels):
    """e * c - e * c is zero only without a fused multiply-add."""
    q = torch.randn(1, 4, 2, 64).bfloat16().repeat_interleave(2, dim=-1)
    cos = torch.randn(4, 128)
    ones = torch.ones(128).bfloat16()
    args = (q, q, ones, ones, cos, cos, EPS)
    assert_equals_model(kernels["joint_qk_norm_rope"], joint_model, args)
    even = kernels["joint_qk_norm_rope"].run(*args)[0][..., ::2]
    assert not even.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_with_shared_and_with_own_tables(kernels, dtype):
    kernel = kernels["qk_norm_split_rope"]
    shared = (*angles(2, 3, 3, 50), None, None, EPS)
    assert_equals_model(kernel, split_model, (*split_source(dtype), *shared))
    own = (*angles(2, 3, 3, 50), *angles(2, 3, 5, 50), EPS)
    assert_equals_model(kernel, split_model, (*split_source(dtype, k_tokens=5), *own))


def test_split_over_a_model_width_with_expanded_tables_and_strided_rows(kernels):
    packed = torch.randn(2, 2, 2 * 2048).bfloat16()
    q, k = packed.chunk(2, dim=-1)
    tables = [table.expand(2, -1, -1, -1) for table in torch.randn(2, 1, 32, 2, 32)]
    weights = torch.randn(2, 2048).bfloat16()
    assert_equals_model(
        kernels["qk_norm_split_rope"], split_model, (q, k, *weights, *tables, None, None, EPS)
    )


def test_split_sums_are_fused_multiply_adds(kernels):
    """x * c - x * c leaves the rounding error of the first product, zero if both were rounded."""
    half = torch.randn(1, 2, 64).bfloat16()
    q, ones = torch.cat((half, half), dim=-1), torch.ones(128).bfloat16()
    cos = torch.randn(1, 1, 2, 64)
    for part, sin in enumerate((cos, -cos)):
        args = (q, q, ones, ones, cos, sin, None, None, EPS)
        assert_equals_model(kernels["qk_norm_split_rope"], split_model, args)
        cancelled = kernels["qk_norm_split_rope"].run(*args)[0].chunk(2, dim=-1)[part]
        assert cancelled.count_nonzero() > 64


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy announces every overflow
@pytest.mark.parametrize("dtype", DTYPES)
def test_overflow_subnormals_signed_zeros_and_nan(kernels, dtype):
    joint = (*joint_source(dtype, batch=1, tokens=1, heads=8), *torch.zeros(2, 1, 128), EPS)
    for call in stress_calls(joint):
        assert_equals_model(kernels["joint_qk_norm_rope"], joint_model, call)
    split = (*split_source(dtype, batch=1, width=32), *angles(1, 2, 3, 8))
    for call in stress_calls((*split, None, None, EPS)):
        assert_equals_model(kernels["qk_norm_split_rope"], split_model, call)


@pytest.mark.parametrize("site", ["joint_qk_norm_rope", "qk_norm_split_rope"])
def test_norm_alone_is_within_one_unit_of_eager(kernels, site):
    """With angles of zero only the order of the sum is left between the kernel and CPU eager."""
    if site == "joint_qk_norm_rope":
        args = (*joint_source(torch.bfloat16), torch.ones(3, 128), torch.zeros(3, 128), EPS)
    else:
        still = (torch.ones(2, 3, 3, 50), torch.zeros(2, 3, 3, 50), None, None, EPS)
        args = (*split_source(torch.bfloat16), *still)
    for expected, actual in zip(getattr(references, site)(*args), kernels[site].run(*args), strict=True):
        assert (expected.view(torch.int16).int() - actual.view(torch.int16).int()).abs().max() <= 1


def test_shortened_arguments_are_served(kernels):
    kernel = kernels["joint_qk_norm_rope"]
    source = joint_source(torch.bfloat16, tokens=70, heads=1)
    first = joint_source(torch.bfloat16, tokens=5, heads=1)
    short = kernel.shorten(*source, *torch.randn(2, 75, 128), EPS, *first)
    assert kernel.refuses(*short) == ""
    assert [short[i].shape[0 if i == 4 else 1] for i in (0, 4, 7)] == [64, 69, 5]

    kernel = kernels["qk_norm_split_rope"]
    source = split_source(torch.bfloat16, q_tokens=70, k_tokens=5)
    short = kernel.shorten(*source, *angles(2, 3, 70, 50), *angles(2, 3, 5, 50), EPS)
    assert kernel.refuses(*short) == ""
    assert (short[0].shape[1], short[1].shape[1], short[4].shape[2]) == (64, 5, 64)


def replaced(args, position, value):
    return (*args[:position], value, *args[position + 1 :])


def test_joint_refusals_name_the_argument(kernels):
    refuses = kernels["joint_qk_norm_rope"].refuses
    q, k, q_scale, k_scale = joint_source(torch.bfloat16)
    args = (q, k, q_scale, k_scale, *torch.randn(2, 5, 128), EPS, *joint_source(torch.bfloat16, tokens=2))
    assert refuses(*args) == ""
    odd = torch.zeros(q.numel() + 1).bfloat16()[1:].view(q.shape)
    table = torch.zeros(5, 128)
    for position, value, words in (
        (0, torch.zeros(1, 2, 3, 64), "(B, L, H, 128)"),
        (1, k.contiguous(), "q and k differ"),
        (1, k.view(torch.float16), "k: torch.float16"),
        (2, q_scale.float(), "q_scale: torch.float32"),
        (2, torch.zeros(64).bfloat16(), "q_scale: shape (64,)"),
        (3, torch.zeros(256).bfloat16()[::2], "k_scale: strides (2,)"),
        (3, torch.zeros(129).bfloat16()[1:], "k_scale: not aligned"),
        (4, table.double(), "cos: torch.float64"),
        (4, table[:4], "cos: torch.float32 (4, 128)"),
        (5, torch.zeros(128, 5).t(), "sin: strides"),
        (6, 1e-40, "eps"),
        (7, args[7][:, :, :8], "first q: shape"),
        (8, args[8].contiguous(), "first q and first k differ"),
        (9, args[9].float(), "first q_scale: torch.float32"),
    ):
        assert words in refuses(*replaced(args, position, value)), words
    assert "q: not aligned" in refuses(odd, odd, *args[2:])
    column = torch.zeros(2, 3, 9, 256).bfloat16()[..., ::2]
    assert "q: strides" in refuses(column, column, *args[2:])


def test_split_refusals_name_the_argument(kernels):
    refuses = kernels["qk_norm_split_rope"].refuses
    q, k, q_scale, k_scale = split_source(torch.bfloat16, k_tokens=5)
    cos, sin = angles(2, 3, 3, 50)
    args = (q, k, q_scale, k_scale, cos, sin, *angles(2, 3, 5, 50), EPS)
    assert refuses(*args) == ""
    for position, value, words in (
        (0, q[0], "q: 2 dimensions"),
        (0, torch.zeros(2, 3, 600).bfloat16()[..., ::2], "q: strides"),
        (0, torch.zeros(q.numel() + 1).bfloat16()[1:].view(q.shape), "q: not aligned"),
        (1, k[:1], "k: shape (1, 5, 300)"),
        (1, k.half(), "k: torch.float16"),
        (3, k_scale.float(), "k_scale: torch.float32"),
        (4, cos.double(), "cos: torch.float64"),
        (4, cos[:, :2], "cos: shape (2, 2, 3, 50)"),
        (5, sin.contiguous(), "sin: strides"),
        (6, None, "k_cos and k_sin"),
        (7, args[7][:, :, :4], "k_sin: shape"),
        (8, 1e-40, "eps"),
    ):
        assert words in refuses(*replaced(args, position, value)), words
    assert "cos: shape (2, 3, 3, 50) for (2, 5, 300)" in refuses(*args[:6], None, None, EPS)
    wide = (torch.zeros(1, 2, 8196).bfloat16(),) * 2
    assert "q: width 8196" in refuses(*wide, *args[2:])
