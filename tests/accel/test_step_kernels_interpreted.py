"""swiglu_concat and guided_euler_step under the Triton interpreter."""

import pytest
import torch

from accel.fusion import references
from accel.fusion.compare import first_mismatch
from accel.fusion.stress import stress_calls

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def test_swiglu_concat_reads_attention_and_a_slice_of_the_projection(kernels, assert_equals_eager):
    attention = torch.randn(2, 5, 3, 420).bfloat16().transpose(1, 2).flatten(2)
    strided = torch.randn(2, 3, 2304).bfloat16()[..., 204:]
    packed = torch.randn(2, 3, 3000).bfloat16()[..., 760:]
    for first in (attention, strided, packed[..., :8]):
        assert_equals_eager(kernels["swiglu_concat"], references.swiglu_concat, first, packed)


def test_swiglu_concat_on_every_encoding(kernels):
    """CPU and NumPy exp differ in the last fp32 digit, which no normal bf16 result shows."""
    first, packed = kernels["swiglu_concat"].proof(torch.bfloat16, torch.device("cpu"))
    assert packed[..., :1024].view(torch.int16).unique().numel() == 2**16
    args = (packed[..., :1024], packed)
    expected, actual = references.swiglu_concat(*args), kernels["swiglu_concat"].run(*args)
    assert first_mismatch(expected[..., :1024], actual[..., :1024]) is None
    normal = expected.abs() >= torch.finfo(torch.bfloat16).tiny
    assert torch.equal(expected[normal], actual[normal])
    assert torch.equal(expected.isnan(), actual.isnan())
    assert kernels["swiglu_concat"].refuses(first, packed) == ""


def test_swiglu_concat_refusals_name_the_argument(kernels):
    refuses = kernels["swiglu_concat"].refuses
    first, packed = torch.zeros(2, 3, 8).bfloat16(), torch.zeros(2, 3, 12).bfloat16()
    assert refuses(first, packed) == ""
    for args, words in (
        ((first[0], packed), "first: 2 dimensions"),
        ((torch.zeros(2, 3, 16).bfloat16()[..., ::2], packed), "first: strides"),
        ((first, torch.zeros(2, 3, 24).bfloat16()[..., ::2]), "packed: strides"),
        ((first[:1], packed), "packed: torch.bfloat16 (2, 3, 12) beside"),
        ((first, packed.float()), "packed: torch.float32"),
        ((first, packed[..., :11]), "packed: odd width 11"),
    ):
        assert words in refuses(*args)


def cuda_euler_step(sample, cond, uncond, guidance, delta):
    """The reference as CUDA computes it: a scalar tensor is rounded to the dtype of its partner first."""
    return references.guided_euler_step(sample, cond, uncond, guidance, delta.to(cond.dtype).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_guided_euler_step_follows_the_rule_for_device_scalars(kernels, dtype, wide):
    sample = torch.randn(2, 5, 300).to(torch.float32 if wide else dtype)
    cond, uncond = torch.randn(2, 2, 5, 300).to(dtype)
    delta = torch.tensor(-0.0371)
    kernel = kernels["guided_euler_step"]
    for args in ((sample, cond, uncond, 4.3, delta), (sample, cond, None, 1.0, delta)):
        assert kernel.refuses(*args) == ""
        mismatch = first_mismatch(cuda_euler_step(*args), kernel.run(*args))
        assert mismatch is None, str(mismatch)
    if dtype != torch.float32:
        plain = (sample.float() - 0.0371 * cond.float()).to(dtype)
        assert not torch.equal(plain, kernel.run(sample, cond, None, 1.0, delta))


def test_guided_euler_step_keeps_the_memory_order_of_the_sample(kernels, assert_equals_eager):
    """Latents may be a transposed view, and velocities a slice of the network's output."""
    sample = torch.randn(2, 6, 5).bfloat16().transpose(1, 2)
    cond, uncond = torch.randn(2, 2, 9, 6).bfloat16()[:, :, :5]
    delta = torch.tensor(-0.03125)
    for other in (uncond, None):
        args = (sample, cond, other, 3.5, delta)
        assert_equals_eager(kernels["guided_euler_step"], references.guided_euler_step, *args)


def test_guided_euler_step_equals_eager_where_the_delta_has_few_digits(kernels, assert_equals_eager):
    kernel, delta = kernels["guided_euler_step"], torch.tensor(-0.03125)
    for shape in ((1,), (1, 1024), (2, 3, 4, 5)):
        args = (torch.randn(shape), *torch.randn(2, *shape).bfloat16(), 3.5, delta)
        assert_equals_eager(kernel, references.guided_euler_step, *args)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy announces every overflow
@pytest.mark.parametrize("dtype", DTYPES)
def test_guided_euler_step_on_overflow_subnormals_signed_zeros_and_nan(kernels, dtype):
    zeros = torch.zeros(1, 20, 64)
    for call in stress_calls((zeros, zeros.to(dtype), zeros.to(dtype), 4.3, torch.zeros(()))):
        mismatch = first_mismatch(cuda_euler_step(*call), kernels["guided_euler_step"].run(*call))
        assert mismatch is None, str(mismatch)


def test_guided_euler_step_refusals_name_the_argument(kernels):
    refuses = kernels["guided_euler_step"].refuses
    x, delta = torch.zeros(1, 4, 8), torch.zeros(())
    assert refuses(x, x, x, 1.0, delta) == ""
    strided = torch.zeros(1, 4, 16)[..., ::2]
    for args, words in (
        ((x, x, x, 1.0, delta.view(1)), "delta: torch.float32 of 1 dimensions"),
        ((x, x, x, 1.0, delta.double()), "delta: torch.float64"),
        ((x, x.double(), None, 1.0, delta), "cond: torch.float64"),
        ((delta, delta, None, 1.0, delta), "cond: torch.float32 of 0 dimensions"),
        ((x, x, x.half(), 1.0, delta), "uncond: torch.float16"),
        ((x[:, :1], x, x, 1.0, delta), "sample: shape"),
        ((x, x, x[:, :1], 1.0, delta), "uncond: shape"),
        ((strided, x, x, 1.0, delta), "sample: strides"),
        ((x[0], strided[0], None, 1.0, delta), "cond: strides"),
        ((x[0], x[0], strided[0], 1.0, delta), "uncond: strides"),
        (
            (x.bfloat16(), x.half(), None, 1.0, delta),
            "sample: torch.bfloat16, neither fp32 nor torch.float16",
        ),
    ):
        assert words in refuses(*args), words
