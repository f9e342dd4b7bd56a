"""Norm kernels against eager on a CUDA device: whole tensors, bit for bit.

Run with `python -m pytest tests/gpu/test_norm_kernels_gpu.py -m gpu`.
"""

import pytest
import torch

pytest.importorskip("triton")

from gpu_kernel_harness import assert_exact

from accel.fusion.compare import first_mismatch
from accel.fusion.registry import get
from accel.fusion.stress import stress_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYER_NORMS = ("layer_norm_modulate", "residual_layer_norm_modulate")
RMS_NORMS = ("rms_norm_modulate", "residual_rms_norm_modulate")
SITES = LAYER_NORMS + RMS_NORMS
AWKWARD_ROWS = (1, 15, 16, 17, 127)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def arguments(site, *, batch=1, tokens=127, width=3072, dtype=torch.bfloat16):
    """Activations on their own, modulations as chunks of one projection of the timestep."""
    x, a, b = (randn(batch, tokens, width, dtype=dtype) for _ in range(3))
    shift, scale, gate, shift2, scale2 = randn(batch, 1, 5 * width, dtype=dtype).chunk(5, dim=-1)
    return {
        "layer_norm_modulate": (x, shift, scale, None, EPS),
        "residual_layer_norm_modulate": (x, gate, a, b, shift, scale, None, EPS),
        "rms_norm_modulate": (x, shift, scale, EPS),
        "residual_rms_norm_modulate": (x, gate, a, shift, scale, shift2, scale2, EPS),
    }[site]


@pytest.mark.parametrize("site", LAYER_NORMS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "width"),
    # FLUX 3 joint, FLUX.2 image, text and joint at 1024 x 1024, and its wider models
    [(3173, 3072), (4096, 3072), (512, 3072), (4608, 3072), (4608, 4096), (4608, 6144)],
)
def test_layer_norm_at_model_shapes(site, batch, tokens, width):
    assert_exact(site, arguments(site, batch=batch, tokens=tokens, width=width))


@pytest.mark.parametrize("site", RMS_NORMS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("tokens", "width"), [(6144, 4096), (1536, 4096), (126, 2048)])
def test_rms_norm_at_model_shapes(site, batch, tokens, width):
    """LTX-2 video at one and two stages, and its audio."""
    assert_exact(site, arguments(site, batch=batch, tokens=tokens, width=width))


@pytest.mark.parametrize(
    ("site", "rows"),
    [(site, rows) for site in SITES for rows in AWKWARD_ROWS if site in LAYER_NORMS or rows >= 16],
)
@pytest.mark.parametrize("width", [128, 512, 516, 1536, 2048, 3076, 8160])
def test_awkward_numbers_of_rows_and_widths(site, rows, width):
    assert_exact(site, arguments(site, tokens=rows, width=width))


@pytest.mark.parametrize("site", RMS_NORMS)
def test_too_few_rows_are_refused(site):
    assert "15 rows" in get(site).load().refuses(*arguments(site, tokens=15))
    assert_exact(site, arguments(site, batch=2, tokens=8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("site", SITES)
def test_every_dtype_and_stress_vectors(site, dtype):
    args = arguments(site, tokens=64, width=3072, dtype=dtype)
    assert_exact(site, args)
    for call in stress_calls(args):
        assert_exact(site, call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("site", SITES)
def test_values_far_from_zero(site, dtype):
    """A large mean is where an error in Welford's recurrence shows."""
    x, *others = arguments(site, tokens=1000, dtype=dtype)
    assert_exact(site, (100 + x, *others))


@pytest.mark.parametrize("start", [0, 1, 4])
def test_slices_of_a_packed_projection(start):
    """Odd starts too: where eager copies to aligned memory first, the kernel reads in place."""
    x, a, b = randn(2, 50, 3 * 3072 + start)[..., start:].chunk(3, dim=-1)
    shift, scale, gate = randn(2, 50, 3, 3072).unbind(2)  # per token
    row = randn(2, 1, 3072)
    for gates in (gate, row, row.expand(2, 50, 3072)):
        assert_exact("residual_layer_norm_modulate", (x, gates, a, b, shift, scale, None, EPS))
        assert_exact("residual_rms_norm_modulate", (x, gates, a, shift, scale, row, row, EPS))
    assert_exact("layer_norm_modulate", (x, shift, row, None, EPS))
    assert_exact("rms_norm_modulate", (x, row, scale, EPS))


def test_rows_from_an_odd_token_on():
    x = randn(1, 51, 3072)[:, 1:]
    row = randn(1, 1, 3072)
    assert_exact("layer_norm_modulate", (x, row, row, None, EPS))
    assert_exact("rms_norm_modulate", (x, row, row, EPS))


def test_contiguous_rows_off_alignment_are_refused_by_layer_norm_alone():
    x = randn(50 * 3072 + 1)[1:].view(1, 50, 3072)
    row = randn(1, 1, 3072)
    assert "multiple of four elements" in get("layer_norm_modulate").load().refuses(x, row, row, None, EPS)
    assert_exact("residual_layer_norm_modulate", (x, row, x, None, row, row, None, EPS))
    assert_exact("rms_norm_modulate", (x, row, row, EPS))


@pytest.mark.parametrize("tables", [1, 2], ids=["one table", "one table a sample"])
def test_segments(tables):
    """FLUX 3: one modulation row for each of five segments of the joint sequence."""
    x, a, b = (randn(2, 3173, 3072) for _ in range(3))
    shift, scale, gate = randn(tables, 5, 3 * 3072).chunk(3, dim=-1)
    segment = torch.arange(5, dtype=torch.int32, device="cuda").repeat_interleave(635)[:3173]
    assert_exact("layer_norm_modulate", (x, shift, scale, segment, EPS))
    for second in (b, None):
        assert_exact("residual_layer_norm_modulate", (x, gate, a, second, shift, scale, segment, EPS))


def test_residual_rms_norm_with_what_may_be_missing():
    x, gate, branch, shift, scale, *_ = arguments("residual_rms_norm_modulate", tokens=126, width=2048)
    assert_exact("rms_norm_modulate", (x, None, None, EPS))
    for some_gate in (gate, None):
        for modulation in ((shift, scale), (None, None)):
            args = (x, some_gate, branch, *modulation, None, None, EPS)
            assert_exact("residual_rms_norm_modulate", args)


@pytest.mark.parametrize("site", SITES)
def test_captured_kernel_replays_equal(site):
    args = arguments(site)
    run = get(site).load().run
    run(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*args)
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg.normal_()
    graph.replay()
    assert first_mismatch(get(site).reference(*args), captured) is None
