"""Norm kernels under the Triton interpreter against ATen's CUDA order, written out in plain torch.

ATen's CPU kernels add up in another order, so their results differ now and then by one unit. Bits on a
device are settled by tests/gpu/test_norm_kernels_gpu.py.
"""

import pytest
import torch
import torch.nn.functional as F
from fused_multiply_add import fma

from accel.fusion import references
from accel.fusion.compare import first_mismatch
from accel.fusion.references import per_token
from accel.fusion.stress import stress_calls

# The interpreter divides by the empty count of threads beyond a row, and stress vectors overflow.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def combine(low, high):
    """Moments (mean, m2, count) of two sets of values together, the low thread's and the high thread's."""
    count = low[2] + high[2]
    reciprocal = 1.0 / count
    low_weight, high_weight = reciprocal * low[2], high[2] * reciprocal
    delta = low[0] - high[0]
    mean = fma(high[0], high_weight, low_weight * low[0])
    m2 = fma(low_weight, high[2] * (delta * delta), high[1] + low[1])
    return mean.where(count > 0, 0.0), m2.where(count > 0, 0.0), count


def fold(moments, dim):
    """Combine the first half of dimension `dim` with the second half."""
    return combine(*zip(*(part.chunk(2, dim) for part in moments), strict=True))


def aten_layer_norm(x, eps=EPS):
    """(..., N) -> (..., N), section 3.1 of the fusion spec: 128 threads, vectors of four, Welford."""
    width = x.shape[-1]
    wide = x.float()
    steps = F.pad(wide, (0, -width % 512)).unflatten(-1, (-1, 128, 4))
    moments = tuple(torch.zeros(*x.shape[:-1], 128) for _ in range(3))
    for step, vectors in enumerate(steps.unbind(-3)):
        inside = 512 * step + 4 * torch.arange(128) < width
        for value in vectors.unbind(-1):
            mean, m2, count = moments
            delta, new_count = value - mean, count + 1
            new_mean = fma(delta, 1.0 / new_count, mean)
            new = (new_mean, fma(delta, value - new_mean, m2), new_count)
            moments = tuple(after.where(inside, before) for after, before in zip(new, moments, strict=True))
    moments = tuple(part.unflatten(-1, (4, 32)) for part in moments)
    for dim in (-1,) * 5 + (-2,) * 2:
        moments = fold(moments, dim)
    mean, m2 = (part.flatten(-2) for part in moments[:2])
    rstd = torch.rsqrt(m2 / torch.tensor(float(width)) + eps)
    return (rstd * (wide - mean)).to(x.dtype)


def aten_rms_norm(x, eps=EPS):
    """(..., N) -> (..., N), the mean by section 3.3 of the fusion spec: 32 lanes of four accumulators."""
    wide = x.float()
    total = torch.zeros(*x.shape[:-1], 128)
    for squares in F.pad(wide.pow(2), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128)).unbind(-2):
        total = total + squares
    a0, a1, a2, a3 = total.unflatten(-1, (32, 4)).unbind(-1)
    lanes = ((a0 + a1) + a2) + a3
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes[..., :distance] + lanes[..., distance:]
    factor = torch.tensor(1.0) / torch.tensor(float(x.shape[-1]))
    return (wide * torch.rsqrt(lanes * factor + eps)).to(x.dtype)


def layer_norm_model(x, shift, scale, segment, eps):
    return references.modulate(aten_layer_norm(x, eps), per_token(shift, segment), per_token(scale, segment))


def residual_layer_norm_model(x, gate, a, b, shift, scale, segment, eps):
    total = references.gated_residual(x, per_token(gate, segment), a, b)
    return total, layer_norm_model(total, shift, scale, segment, eps)


def rms_norm_model(x, shift, scale, eps):
    normed = aten_rms_norm(x, eps)
    return normed if scale is None else references.modulate(normed, shift, scale)


def residual_rms_norm_model(x, gate, branch, shift, scale, shift2, scale2, eps):
    total = x + branch if gate is None else references.gated_residual(x, gate, branch)
    outputs = (total, rms_norm_model(total, shift, scale, eps))
    return outputs if scale2 is None else (*outputs, rms_norm_model(total, shift2, scale2, eps))


MODELS = {
    "layer_norm_modulate": layer_norm_model,
    "residual_layer_norm_modulate": residual_layer_norm_model,
    "rms_norm_modulate": rms_norm_model,
    "residual_rms_norm_modulate": residual_rms_norm_model,
}


@pytest.fixture
def assert_equals_model(kernels):
    """Assert that the kernel of a site takes the arguments and gives every bit of the model."""

    def check(site, *args):
        assert kernels[site].refuses(*args) == ""
        mismatch = first_mismatch(MODELS[site](*args), kernels[site].run(*args))
        assert mismatch is None, str(mismatch)

    return check


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.bfloat16: torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize(("width", "rows"), [(4, 1), (128, 1), (512, 1), (3072, 2), (1540, 16)])
def test_layer_norm_adds_in_the_order_of_aten(assert_equals_model, randn, width, rows):
    """fp32, so that no rounding hides the order; widths with full, missing and ragged last tiles.

    A ragged width with many rows shows which side of a fold is the lower, and that m2 / N is a division.
    """
    x = 3 * randn(1, rows, width, dtype=torch.float32) + 10
    zero = torch.zeros(1, 1, width)
    assert_equals_model("layer_norm_modulate", x, zero, zero, None, EPS)


@pytest.mark.parametrize("width", [128, 512, 1540, 3072])
def test_mean_square_adds_in_the_order_of_aten(assert_equals_model, randn, width):
    assert_equals_model("rms_norm_modulate", 3 * randn(2, 8, width, dtype=torch.float32), None, None, EPS)


def test_the_models_tell_orders_apart(randn):
    """Otherwise the tests above would prove nothing."""
    x = 3 * randn(64, 1536, dtype=torch.float32) + 1
    shuffled = torch.randperm(1536, generator=torch.Generator().manual_seed(0))
    for model in (aten_layer_norm, aten_rms_norm):
        assert not torch.equal(model(x)[:, shuffled], model(x[:, shuffled]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_and_layer_norm_in_every_dtype(assert_equals_model, randn, dtype):
    x, a, b = randn(3, 1, 2, 516, dtype=dtype)
    shift, scale, gate = randn(1, 1, 3 * 516, dtype=dtype).chunk(3, dim=-1)
    for second in (b, None):
        assert_equals_model("residual_layer_norm_modulate", x, gate, a, second, shift, scale, None, EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_and_rms_norm_in_every_dtype_with_up_to_two_modulations(assert_equals_model, randn, dtype):
    x, branch = randn(2, 1, 16, 516, dtype=dtype)
    gate, *modulations = randn(1, 1, 5 * 516, dtype=dtype).chunk(5, dim=-1)
    for some_gate, some in ((gate, modulations), (None, [*modulations[:2], None, None]), (gate, [None] * 4)):
        assert_equals_model("residual_rms_norm_modulate", x, some_gate, branch, *some, EPS)


def test_slices_of_a_packed_projection_in_a_batch_of_two(assert_equals_model, randn):
    """Rows that start anywhere, per-token rows, rows repeated by expansion: all read where they lie."""
    x, a, b = randn(2, 9, 3 * 512 + 1)[:, 1:, 1:].chunk(3, dim=-1)
    per_token_rows = randn(2, 8, 2, 512).unbind(2)
    expanded = [rows.expand(2, 8, 512) for rows in randn(2, 1, 512)]
    for shift, scale in (per_token_rows, expanded):
        assert_equals_model("layer_norm_modulate", x[:, :2], shift[:, :2], scale[:, :2], None, EPS)
        assert_equals_model("rms_norm_modulate", x, shift, scale, EPS)
    shift, scale = per_token_rows
    assert_equals_model("residual_rms_norm_modulate", x, expanded[0], a, shift, scale, None, None, EPS)
    x, gate, a, b, shift, scale = (each[:, :2] for each in (x, expanded[0], a, b, shift, scale))
    assert_equals_model("residual_layer_norm_modulate", x, gate, a, b, shift, scale, None, EPS)


@pytest.mark.parametrize("tables", [1, 2], ids=["one table", "one table a sample"])
def test_segments_pick_the_row_of_every_token(assert_equals_model, randn, tables):
    x, a = randn(2, 2, 3, 128)
    shift, scale, gate = randn(tables, 3, 3 * 128).chunk(3, dim=-1)
    segment = torch.tensor([2, 0, 2], dtype=torch.int32)
    assert_equals_model("layer_norm_modulate", x, shift, scale, segment, EPS)
    assert_equals_model("residual_layer_norm_modulate", x, gate, a, None, shift, scale, segment, EPS)


@pytest.mark.parametrize("site", ["layer_norm_modulate", "residual_layer_norm_modulate"])
def test_shortened_arguments_keep_the_table_of_segments(kernels, randn, site):
    """Stress vectors run on the first tokens, of which any may belong to the last of many segments."""
    x, a = randn(2, 1, 100, 128)
    shift, scale, gate = randn(3, 1, 100, 128)
    segment = torch.arange(99, -1, -1, dtype=torch.int32)
    args = (x, gate, a, None, shift, scale, segment, EPS)
    if site == "layer_norm_modulate":
        args = (x, shift, scale, segment, EPS)
    short = kernels[site].shorten(*args)
    expected = references.per_token(shift, segment)[:, :64]
    assert short[0].shape == (1, 64, 128)
    assert torch.equal(references.per_token(short[-4], short[-2]), expected)


def test_shortened_arguments_without_segments_are_the_first_tokens(kernels, randn):
    x, shift, scale = randn(3, 1, 100, 128)
    short = kernels["layer_norm_modulate"].shorten(x, shift, scale, None, EPS)
    assert all(torch.equal(got, full[:, :64]) for got, full in zip(short[:3], (x, shift, scale), strict=True))
    assert short[3:] == (None, EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_overflow_subnormals_signed_zeros_and_nan(assert_equals_model, dtype):
    """Sixteen rows hold every pattern, the shifts and scales another each."""
    x = torch.zeros(1, 16, 128, dtype=dtype)
    x, shift, scale, gate, a = next(stress_calls((x,) * 5))
    assert_equals_model("residual_layer_norm_modulate", x, gate, a, None, shift, scale, None, EPS)
    assert_equals_model("residual_rms_norm_modulate", x, gate, a, shift, scale, None, None, EPS)


@pytest.mark.parametrize("norm", ["layer_norm_modulate", "rms_norm_modulate"])
def test_norm_is_within_one_unit_of_eager(kernels, randn, norm):
    x, zero = randn(1, 16, 516), torch.zeros(1, 1, 516, dtype=torch.bfloat16)
    args = (x[:, :3], zero, zero, None, EPS) if norm == "layer_norm_modulate" else (x, None, None, EPS)
    units = kernels[norm].run(*args).view(torch.int16).int() - getattr(references, norm)(*args).view(
        torch.int16
    )
    assert units.abs().max() <= 1


X = torch.zeros(1, 16, 128, dtype=torch.bfloat16)
ROW = X[:, :1]
TABLE = torch.zeros(1, 3, 128, dtype=torch.bfloat16)
SEGMENT = torch.zeros(16, dtype=torch.int32)
ODD = torch.zeros(16 * 128 + 1, dtype=torch.bfloat16)[1:].view(1, 16, 128)


@pytest.mark.parametrize(
    ("site", "args", "says"),
    [
        ("layer_norm_modulate", (ODD, ROW, ROW, None, EPS), "x: does not start at a multiple of four"),
        ("layer_norm_modulate", (X[0], ROW, ROW, None, EPS), "x: 2 dimensions"),
        ("layer_norm_modulate", (X[..., ::2], ROW[..., :64], ROW[..., :64], None, EPS), "x: strides"),
        ("layer_norm_modulate", (X[..., :126], ROW[..., :126], ROW[..., :126], None, EPS), "x: width 126"),
        ("layer_norm_modulate", (X, ROW[..., ::2], ROW, None, EPS), "shift: shape"),
        ("layer_norm_modulate", (X, ROW, ROW.float(), None, EPS), "scale: torch.float32"),
        ("layer_norm_modulate", (X, ROW[0, 0], ROW, None, EPS), "shift: 1 dimensions"),
        ("layer_norm_modulate", (X, ROW, ROW, None, 1e-39), "eps: 1e-39"),
        ("layer_norm_modulate", (X, TABLE, TABLE, None, EPS), "shift: shape"),
        ("layer_norm_modulate", (X, TABLE, TABLE, SEGMENT.long(), EPS), "segment: torch.int64"),
        ("layer_norm_modulate", (X, TABLE, TABLE, SEGMENT[1:], EPS), "segment: torch.int32 (15,)"),
        ("layer_norm_modulate", (X, TABLE[0, 0], TABLE, SEGMENT, EPS), "shift: 1 dimensions"),
        ("residual_layer_norm_modulate", (X, TABLE, X, X, ROW, ROW, None, EPS), "gate: shape"),
        ("residual_layer_norm_modulate", (X, ROW, X[:, :5], X, ROW, ROW, None, EPS), "a: shape"),
        ("residual_layer_norm_modulate", (X, ROW, X, X.half(), ROW, ROW, None, EPS), "b: torch.float16"),
        ("residual_layer_norm_modulate", (X, ROW, X, None, ROW, ROW, None, 0.0), "eps: 0.0"),
        ("rms_norm_modulate", (X[:, :15], None, None, EPS), "x: 15 rows"),
        ("rms_norm_modulate", (X[..., :124], None, None, EPS), "x: width 124"),
        ("rms_norm_modulate", (X, None, ROW, EPS), "shift and scale"),
        ("rms_norm_modulate", (X[0], None, None, EPS), "x: 2 dimensions"),
        ("rms_norm_modulate", (X, ROW, ROW, 1e-39), "eps: 1e-39"),
        ("residual_rms_norm_modulate", (X, ROW, X, None, None, ROW, None, EPS), "shift2 and scale2"),
        ("residual_rms_norm_modulate", (X, TABLE, X, None, None, None, None, EPS), "gate: shape"),
    ],
)
def test_refusals_name_the_argument(kernels, site, args, says):
    assert says in kernels[site].refuses(*args)


def test_widths_and_numbers_of_rows_that_aten_reduces_otherwise(kernels):
    """No memory behind these: 8,164 columns give a lane 256 values; 132 * (2**19 + 1) needs 25 bits."""
    wide = torch.empty(1, 16, 8196, dtype=torch.bfloat16, device="meta")
    table = wide[:, :1]
    assert "width 8196" in kernels["layer_norm_modulate"].refuses(wide, table, table, None, EPS)
    refuses = kernels["rms_norm_modulate"].refuses
    assert "width 8164" in refuses(wide[..., :8164], None, None, EPS)
    assert refuses(wide[..., :8160], None, None, EPS) == ""
    many = torch.empty(1, 2**19 + 1, 132, dtype=torch.bfloat16, device="meta")
    assert "fp32 does not hold" in refuses(many, None, None, EPS)
    assert refuses(many[:, 1:], None, None, EPS) == ""


def test_an_odd_start_is_served_where_aten_copies_first(kernels):
    """Only the plain norm of a contiguous tensor reads it in place."""
    assert (
        kernels["layer_norm_modulate"].refuses(ODD[..., :64], ROW[..., :64], ROW[..., :64], None, EPS) == ""
    )
    assert kernels["residual_layer_norm_modulate"].refuses(ODD, ROW, X, None, ROW, ROW, None, EPS) == ""
    assert kernels["rms_norm_modulate"].refuses(ODD, None, None, EPS) == ""
