"""joint_qk_norm_rope, qk_norm_split_rope, swiglu_concat and guided_euler_step against eager on CUDA.

Whole tensors, bit for bit, at the shapes of FLUX.2 and LTX-2.
"""

import pytest
import torch

pytest.importorskip("triton")

from gpu_kernel_harness import assert_exact

from accel.fusion.compare import first_mismatch
from accel.fusion.gate import Gate
from accel.fusion.registry import get
from accel.fusion.stress import stress_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SITES = ("joint_qk_norm_rope", "qk_norm_split_rope", "swiglu_concat", "guided_euler_step")
TOKENS = 4096
EPS = 1e-6


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def joint_source(batch, tokens, heads, dtype):
    """q and k as FLUX.2 cuts them from one projection (q, k, v, two MLP halves), and their weights."""
    width = heads * 128
    projection = randn(batch, tokens, 9 * width, dtype=dtype)
    q, k = (part.unflatten(-1, (heads, 128)) for part in projection.split(width, dim=-1)[:2])
    return q, k, randn(128, dtype=dtype), randn(128, dtype=dtype)


def joint(*, batch=1, tokens=TOKENS, dtype=torch.bfloat16, heads=24, text=512):
    """Image tokens of a packed projection after text tokens of three plain ones."""
    angle = (torch.rand(text + tokens, 64, device="cuda") * 100).repeat_interleave(2, dim=-1)
    image = (*joint_source(batch, tokens, heads, dtype), angle.cos(), angle.sin(), EPS)
    if not text:
        return image
    q, k = (randn(batch, text, heads, 128, dtype=dtype) for _ in "qk")
    return (*image, q, k, randn(128, dtype=dtype), randn(128, dtype=dtype))


def angles(batch, heads, tokens, half):
    """cos and sin (B, H, L, d / 2) as LTX-2 makes them: views with the heads inside of the tokens."""
    angle = torch.rand(batch, tokens, heads, half, device="cuda").transpose(1, 2) * 100
    return angle.cos(), angle.sin()


def split(*, batch=1, tokens=TOKENS, dtype=torch.bfloat16, heads=32, half=64, k_tokens=None):
    """Self-attention; with `k_tokens` cross-attention, k with tables of its own."""
    width = heads * 2 * half
    q = randn(batch, tokens, width, dtype=dtype)
    k = randn(batch, k_tokens or tokens, width, dtype=dtype)
    own = angles(batch, heads, k_tokens, half) if k_tokens else (None, None)
    weights = randn(width, dtype=dtype), randn(width, dtype=dtype)
    return (q, k, *weights, *angles(batch, heads, tokens, half), *own, EPS)


def concat(*, batch=1, tokens=TOKENS, dtype=torch.bfloat16, width=3072):
    """Attention output in the layout of SDPA, and the MLP part of the packed projection."""
    attention = randn(batch, tokens, width // 128, 128, dtype=dtype).flatten(2)
    return attention, randn(batch, tokens, 9 * width, dtype=dtype)[..., 3 * width :]


def euler(*, batch=1, tokens=TOKENS, dtype=torch.bfloat16, sample_dtype=None):
    sample = randn(batch, tokens, 128, dtype=sample_dtype or dtype)
    cond, uncond = randn(2, batch, tokens, 128, dtype=dtype)
    return sample, cond, uncond, 4.3, torch.tensor(-0.0371, device="cuda")


ARGUMENTS = dict(zip(SITES, (joint, split, concat, euler), strict=True))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 127, 1024, TOKENS])
def test_exact_at_any_number_of_tokens(site, batch, tokens):
    assert_exact(site, ARGUMENTS[site](batch=batch, tokens=tokens))


@pytest.mark.parametrize("heads", [1, 9, 24, 32, 48])
@pytest.mark.parametrize("text", [0, 1, 17, 512])
def test_exact_joint_shapes(heads, text):
    assert_exact("joint_qk_norm_rope", joint(heads=heads, text=text, tokens=1024))


@pytest.mark.parametrize(("heads", "half"), [(32, 64), (32, 32), (24, 64), (3, 50), (2, 16), (64, 64)])
def test_exact_split_widths_with_shared_and_own_tables(heads, half):
    assert_exact("qk_norm_split_rope", split(heads=heads, half=half, tokens=1024))
    assert_exact("qk_norm_split_rope", split(heads=heads, half=half, tokens=1024, k_tokens=126))


def test_exact_at_the_full_size_of_a_video():
    assert_exact("qk_norm_split_rope", split(tokens=6144))
    assert_exact("qk_norm_split_rope", split(tokens=6144, half=32, k_tokens=126))
    assert_exact("qk_norm_split_rope", split(tokens=126, half=32, batch=2))
    for width in (4096, 6144):
        assert_exact("swiglu_concat", concat(width=width))


def test_exact_on_views():
    """Rows that start at an odd token, tables in another order or expanded, columns at odd offsets."""
    q, k, q_scale, k_scale, cos, sin, _ = joint(text=0)
    assert_exact("joint_qk_norm_rope", (q[:, 1:], k[:, 1:], q_scale, k_scale, cos[1:], sin[1:], EPS))

    q, k, q_scale, k_scale, cos, sin, *_ = split(tokens=128)
    rest = (None, None, EPS)
    assert_exact("qk_norm_split_rope", (q, k, q_scale, k_scale, cos.contiguous(), sin.contiguous(), *rest))
    odd = (q[:, 1:], k[:, 1:], q_scale, k_scale, cos[:, :, 1:], sin[:, :, 1:], *rest)
    assert_exact("qk_norm_split_rope", odd)
    packed = randn(2, 128, 2 * q.shape[2]).chunk(2, dim=-1)
    expanded = (table.expand(2, -1, -1, -1) for table in (cos, sin))
    assert_exact("qk_norm_split_rope", (*packed, q_scale, k_scale, *expanded, *rest))

    attention = randn(2, 24, 127, 128).transpose(1, 2).flatten(2)
    projection = randn(2, 127, 2 * 9216 + 1)
    assert_exact("swiglu_concat", (attention[..., 1:], projection[..., 1:]))

    sample, cond, uncond, guidance, delta = euler(tokens=127)
    odd = (tensor.flatten()[1:] for tensor in (sample, cond, uncond))
    assert_exact("guided_euler_step", (*odd, guidance, delta))


@pytest.mark.parametrize("site", ["joint_qk_norm_rope", "qk_norm_split_rope"])
def test_misaligned_rows_are_refused(site):
    args = ARGUMENTS[site](tokens=17)
    q = randn(args[0].numel() + 1)[1:].view(args[0].shape)
    assert "not aligned" in get(site).load().refuses(q, q, *args[2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
def test_guided_euler_step_rounds_the_scalar_as_eager_does(dtype, wide):
    sample_dtype = torch.float32 if wide else dtype
    sample, cond, uncond, guidance, delta = euler(dtype=dtype, sample_dtype=sample_dtype)
    for value in (-0.0371, 0.3, 1e-3, 1.0, 0.0):
        assert_exact("guided_euler_step", (sample, cond, uncond, guidance, delta.fill_(value)))
        assert_exact("guided_euler_step", (sample, cond, None, guidance, delta))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("site", SITES)
def test_exact_on_stress_vectors(site, dtype):
    if dtype not in get(site).dtypes:
        pytest.skip(f"{site} does not list {dtype}")
    args = get(site).load().shorten(*ARGUMENTS[site](dtype=dtype))
    for call in stress_calls(args):
        assert_exact(site, call)


def test_swiglu_concat_on_every_encoding():
    assert_exact("swiglu_concat", get("swiglu_concat").load().proof(torch.bfloat16, torch.device("cuda")))


@pytest.mark.parametrize("site", SITES)
def test_replays_of_a_captured_kernel_are_exact(site):
    gate, args = Gate(get(site)), ARGUMENTS[site](tokens=127, batch=2)
    _, outcome = gate.run(*args)
    assert outcome.fused, outcome.detail
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, outcome = gate.run(*args)
    assert outcome.fused, outcome.detail
    for _ in range(2):
        for arg in args:
            if isinstance(arg, torch.Tensor):
                arg.normal_()
        graph.replay()
        mismatch = first_mismatch(get(site).reference(*args), captured)
        assert mismatch is None, str(mismatch)


def test_guided_euler_step_on_transposed_latents_and_sliced_velocities():
    sample = randn(2, 128, 4096).transpose(1, 2)
    cond, uncond = (randn(2, 5000, 128)[:, :4096] for _ in range(2))
    delta = torch.tensor(-0.0371, device="cuda")
    for other in (uncond, None):
        assert_exact("guided_euler_step", (sample, cond, other, 4.3, delta))
