"""The norms of image and video decoders against eager on a CUDA device: whole tensors, bit for bit.

Run with `python -m pytest tests/gpu/test_vae_norm_kernels_gpu.py -m gpu`.
"""

import pytest
import torch

pytest.importorskip("triton")

from gpu_kernel_harness import assert_exact

from accel.fusion.compare import first_mismatch
from accel.fusion.gate import Gate
from accel.fusion.kernels.aten_group_norm import plan_group_statistics
from accel.fusion.registry import get
from accel.fusion.stress import stress_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GROUP_EPS, CHANNEL_EPS = 1e-6, 1e-8
# Decoder levels of the FLUX.2 VAE at 1024 x 1024 and of the LTX-2 VAE at 121 frames of 768 x 512.
IMAGE_LEVELS = [(512, 128, 128), (512, 256, 256), (256, 512, 512), (128, 1024, 1024)]
VIDEO_LEVELS = [(1024, 16, 16, 24), (512, 31, 32, 48), (256, 61, 64, 96), (128, 121, 128, 192)]
LAYOUTS = [torch.contiguous_format, torch.channels_last_3d]


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def group_arguments(*shape, groups=32):
    return 2 * randn(*shape) + 0.5, groups, randn(shape[1]), randn(shape[1]), GROUP_EPS


def arguments(site):
    if site == "group_norm_silu":
        return group_arguments(1, 256, 64, 96)
    return randn(1, 256, 5, 32, 48), CHANNEL_EPS


@pytest.mark.parametrize("level", IMAGE_LEVELS, ids=str)
def test_group_norm_silu_at_model_shapes(level):
    assert_exact("group_norm_silu", group_arguments(1, *level))


@pytest.mark.parametrize(
    "shape", [(2, 64, 24, 40), (3, 32, 23, 31), (1, 96, 127, 129), (1, 512, 16, 32), (2, 32, 1, 512)], ids=str
)
def test_group_norm_silu_at_awkward_shapes(shape):
    assert_exact("group_norm_silu", group_arguments(*shape))
    assert_exact("group_norm_silu", group_arguments(*shape, groups=1))


def test_group_norm_silu_at_an_odd_address():
    values = randn(1 + 64 * 24 * 40)[1:].view(1, 64, 24, 40)
    assert_exact("group_norm_silu", (values, 32, randn(65)[1:], randn(65)[1:], GROUP_EPS))


def test_statistics_are_those_of_native_group_norm():
    """Says whether a mismatch of the site lies in the statistics or after them."""
    x, groups, weight, bias, eps = group_arguments(2, 256, 129, 130)
    _, *expected = torch.native_group_norm(x, weight, bias, 2, 256, 129 * 130, groups, eps)
    actual = plan_group_statistics(x, groups, eps)(x)[:, -2:].contiguous()
    assert first_mismatch(torch.stack([part.flatten().float() for part in expected], dim=1), actual) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("level", VIDEO_LEVELS, ids=str)
def test_channel_norm_silu_at_model_shapes(level, layout):
    assert_exact("channel_norm_silu", (randn(1, *level).to(memory_format=layout), CHANNEL_EPS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 37, 2, 9, 15), (1, 127, 1, 17, 1), (2, 1, 3, 5, 7), (1, 3, 1, 1, 1)], ids=str
)
def test_channel_norm_silu_at_awkward_shapes(shape, layout):
    assert_exact("channel_norm_silu", (randn(*shape).to(memory_format=layout), CHANNEL_EPS))


@pytest.mark.parametrize("site", ["group_norm_silu", "channel_norm_silu"])
def test_exact_on_stress_vectors(site):
    args = arguments(site)
    for call in stress_calls(get(site).load().shorten(*args)):
        assert_exact(site, call)
    for call in stress_calls(args):
        assert_exact(site, call)


@pytest.mark.parametrize("site", ["group_norm_silu", "channel_norm_silu"])
def test_verified_kernel_is_captured_and_replays_equal(site):
    gate, args = Gate(get(site)), arguments(site)
    first, outcome = gate.run(*args)
    assert outcome.fused, outcome.detail
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, outcome = gate.run(*args)
    assert outcome.fused
    graph.replay()
    assert first_mismatch(first, captured) is None
    args[0].normal_()
    graph.replay()
    assert first_mismatch(get(site).reference(*args), captured) is None
