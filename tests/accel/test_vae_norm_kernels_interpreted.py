"""The norms of image and video decoders under the Triton interpreter, against CUDA's arithmetic in torch.

CPU eager rounds elsewhere: group norm keeps its statistics in fp32, and a sum with a number rounds the
number to bf16 first.
"""

from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from fused_multiply_add import fma

from accel.fusion import references
from accel.fusion.compare import first_mismatch
from accel.fusion.stress import stress_calls

# The interpreter of triton 3.6 turns a run-time bound of a loop into a number as numpy 2.4 forbids.
LOOPS_FAIL = version("triton").startswith("3.6") and tuple(map(int, version("numpy").split(".")[:2])) >= (
    2,
    4,
)
needs_loops = pytest.mark.skipif(LOOPS_FAIL, reason="triton's interpreter does not go with this numpy")
CHANNELS_LAST = torch.channels_last_3d
EXACT_EPS = 2.0**-27  # a bf16 number near the 1e-8 of the models, which CPU eager need not round


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def aten_group_statistics(x, groups, eps):
    """bf16 mean and reciprocal deviation: 512 threads, Welford, then folds in warps and across warps."""
    rows = x.float().reshape(x.shape[0] * groups, -1)
    size = rows.shape[1]
    mean = m2 = torch.zeros(len(rows), 512)
    for step, value in enumerate(F.pad(rows, (0, -size % 512)).unflatten(1, (-1, 512)).unbind(1)):
        inside = 512 * step + torch.arange(512) < size
        delta = value - mean
        new_mean = mean + delta / torch.tensor(step + 1.0)
        m2 = fma(delta, value - new_mean, m2).where(inside, m2)
        mean = new_mean.where(inside, mean)
    count = ((size + 511 - torch.arange(512)) // 512).float().expand_as(mean)
    mean, m2, count = (part.unflatten(1, (16, 32)) for part in (mean, m2, count))
    for dim in (2,) * 5 + (1,) * 4:
        (mean, other_mean), (m2, other_m2), (count, other_count) = (
            part.chunk(2, dim) for part in (mean, m2, count)
        )
        delta, total = other_mean - mean, count + other_count
        weight = other_count / total
        mean = fma(delta, weight, mean)
        m2 = fma(delta * delta * count, weight, m2 + other_m2)
        count = total
    variance = (m2 / count).flatten() + torch.tensor(eps).bfloat16()
    return mean.flatten().bfloat16(), torch.rsqrt(variance).bfloat16()


def group_norm_silu_as_cuda(x, groups, weight, bias, eps):
    batch, channels = x.shape[:2]
    mean, rstd = (
        part.float().view(batch, groups, 1).expand(-1, -1, channels // groups).reshape(batch, channels)
        for part in aten_group_statistics(x, groups, eps)
    )
    slope = rstd * weight.float()
    intercept = bias.float() - mean * slope
    slope, intercept = (part.view(batch, channels, 1, 1) for part in (slope, intercept))
    return F.silu(fma(slope, x.float(), intercept).bfloat16())


def assert_group_norms(kernel, *args):
    assert kernel.refuses(*args) == ""
    mismatch = first_mismatch(group_norm_silu_as_cuda(*args), kernel.run(*args))
    assert mismatch is None, str(mismatch)


@needs_loops
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 2, 16, 32), 1), ((1, 4, 23, 31), 2), ((1, 2, 91, 97), 1)],
    ids=["whole steps", "a tail", "two batches of loads"],
)
def test_group_norm_silu_adds_up_as_aten_does(kernels, shape, groups):
    x = (2 * torch.randn(shape) + 1).bfloat16()
    weight, bias = torch.randn(2, shape[1]).bfloat16()
    assert_group_norms(kernels["group_norm_silu"], x, groups, weight, bias, 1e-6)


@needs_loops
def test_group_norm_silu_is_near_cpu_eager(kernels):
    x, weight, bias = (
        torch.randn(1, 4, 23, 31).bfloat16(),
        torch.ones(4).bfloat16(),
        torch.zeros(4).bfloat16(),
    )
    expected = references.group_norm_silu(x.float(), 2, weight.float(), bias.float(), 1e-6)
    actual = kernels["group_norm_silu"].run(x, 2, weight, bias, 1e-6)
    torch.testing.assert_close(actual.float(), expected, rtol=2**-6, atol=2**-7)


@needs_loops
def test_group_norm_silu_on_stress_vectors(kernels):
    """Its stress piece has one pattern in each group: three calls show four groups all twelve."""
    kernel = kernels["group_norm_silu"]
    weight, bias = torch.randn(2, 8).bfloat16()
    x, *rest = kernel.shorten(torch.zeros(1, 8, 12, 64).bfloat16(), 4, weight, bias, 1e-6)
    assert x.shape == (1, 4, 1, 768)
    for (stressed,) in list(stress_calls((x,)))[::4]:
        assert_group_norms(kernel, stressed, *rest)


def test_group_norm_refusals_name_the_argument(kernels):
    refuses = kernels["group_norm_silu"].refuses
    x, ones = torch.zeros(1, 4, 16, 32).bfloat16(), torch.ones(4).bfloat16()
    assert refuses(x, 2, ones, ones, 1e-6) == ""
    assert "shape" in refuses(x[0, 0], 2, ones, ones, 1e-6)
    assert "3 groups" in refuses(x, 3, ones, ones, 1e-6)
    assert "480 pixels" in refuses(x[:, :, 1:].contiguous(), 2, ones, ones, 1e-6)
    assert "x: torch.float32" in refuses(x.float(), 2, ones, ones, 1e-6)
    assert "weight: torch.float32" in refuses(x, 2, ones.float(), ones, 1e-6)
    assert "bias: shape (3,)" in refuses(x, 2, ones, ones[1:], 1e-6)
    assert "eps" in refuses(x, 2, ones, ones, 1e-45)
    huge = torch.empty(1, 2, 2**15, 2**15, dtype=torch.bfloat16, device="meta")
    assert "groups of at most" in refuses(huge, 1, ones[:2], ones[:2], 1e-6)


def channel_norm_silu_as_cuda(x, eps):
    mean = torch.mean(x**2, dim=1, keepdim=True)
    return F.silu(x / torch.sqrt((mean.float() + eps).bfloat16()))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, CHANNELS_LAST], ids=str)
@pytest.mark.parametrize("shape", [(2, 37, 2, 9, 15), (1, 16, 1, 16, 32), (1, 1, 1, 1, 1)], ids=str)
def test_channel_norm_silu(kernels, assert_equals_eager, memory_format, shape):
    x = (3 * torch.randn(shape)).bfloat16().to(memory_format=memory_format)
    kernel = kernels["channel_norm_silu"]
    assert_equals_eager(kernel, references.channel_norm_silu, x, EXACT_EPS)
    mismatch = first_mismatch(channel_norm_silu_as_cuda(x, 1e-8), kernel.run(x, 1e-8))
    assert mismatch is None, str(mismatch)


def test_channel_norm_silu_on_stress_vectors(kernels):
    kernel = kernels["channel_norm_silu"]
    short = kernel.shorten(torch.zeros(2, 3, 2, 12, 16).bfloat16(), 1e-8)
    assert short[0].shape == (2, 1, 1, 12, 16)
    for args in stress_calls(short):
        mismatch = first_mismatch(channel_norm_silu_as_cuda(*args), kernel.run(*args))
        assert mismatch is None, str(mismatch)


def test_channel_norm_refusals_name_the_argument(kernels):
    refuses = kernels["channel_norm_silu"].refuses
    x = torch.zeros(2, 3, 4, 5, 6).bfloat16()
    assert "float16" in refuses(x.half(), 1e-8)
    assert "4 dimensions" in refuses(x[0], 1e-8)
    assert "strides" in refuses(x[:, :, 1:], 1e-8)
    assert "strides" in refuses(x.transpose(3, 4), 1e-8)
    assert "65535" in refuses(torch.zeros(1, 70_000, 1, 1, 1).bfloat16(), 1e-8)
