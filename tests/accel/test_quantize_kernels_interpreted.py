"""Row quantisation under the Triton interpreter, scales and codes exact.

ATen divides by 448 on the CPU and multiplies by its fp32 reciprocal on CUDA; kernels do as CUDA does.
"""

import pytest
import torch

from accel.fusion import references
from accel.fusion.compare import first_mismatch
from accel.fusion.stress import stress_calls


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def quantize_as_cuda(x):
    wide = x.float()
    scale = (wide.abs().amax(-1) * torch.tensor(1 / 448)).clamp_min(1e-12)
    return (wide / scale.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def assert_quantizes(kernel, x):
    assert kernel.refuses(x) == ""
    mismatch = first_mismatch(quantize_as_cuda(x), kernel.run(x))
    assert mismatch is None, str(mismatch)


def assert_quantizes_swiglu(kernel, packed):
    assert kernel.refuses(packed) == ""
    mismatch = first_mismatch(quantize_as_cuda(references.swiglu(packed)), kernel.run(packed))
    assert mismatch is None, str(mismatch)


def layouts(width):
    """Views that rows can be read from by one stride."""
    packed = torch.randn(2, 3, width + 33).bfloat16()
    return {
        "matrix": torch.randn(3, width).bfloat16(),
        "one row": torch.randn(width).bfloat16(),
        "slice of a projection, batch 2": packed[..., 33:],
        "odd token": packed[:1, 1:, :width],
        "four dimensions": torch.randn(1, 2, 2, width).bfloat16(),
    }


@pytest.mark.parametrize("width", [1, 100, 512, 3072, 20480])
def test_quantize_rows_in_every_layout(kernels, width):
    for x in layouts(width).values():
        assert_quantizes(kernels["quantize_rows"], x)


@pytest.mark.parametrize("width", [100, 1536])
def test_swiglu_quantize_rows_in_every_layout(kernels, width):
    for packed in layouts(2 * width).values():
        assert_quantizes_swiglu(kernels["swiglu_quantize_rows"], packed)


def test_overflow_subnormals_signed_zeros_and_nan(kernels):
    """Twelve rows show all twelve patterns."""
    (x,) = next(stress_calls((torch.zeros(12, 64, dtype=torch.bfloat16),)))
    assert_quantizes(kernels["quantize_rows"], x)


def test_a_stress_piece_of_a_batch_is_served(kernels):
    packed = torch.randn(2, 70, 136).bfloat16()[..., 8:]
    for name in ("quantize_rows", "swiglu_quantize_rows"):
        (piece,) = kernels[name].shorten(packed)
        assert kernels[name].refuses(piece) == ""
        assert piece.shape == (64, 128)
        assert piece.stride() == (136, 1)


def test_proof_shows_every_encoding_in_its_own_row(kernels):
    """A row of one value: scale and sign give it back. CPU and NumPy exp agree on normal results."""
    (packed,) = kernels["swiglu_quantize_rows"].proof(torch.bfloat16, torch.device("cpu"))
    assert packed[:, 0].view(torch.int16).unique().numel() == 2**16
    few = packed[::1031]
    silu = references.swiglu(few).flatten()
    few = few[(silu.abs() >= torch.finfo(torch.bfloat16).tiny) | silu.isnan()]
    assert len(few) > 30
    assert_quantizes_swiglu(kernels["swiglu_quantize_rows"], few)


@pytest.mark.parametrize("site", ["quantize_rows", "swiglu_quantize_rows"])
@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (torch.zeros(2, 64), "float32"),
        (torch.zeros((), dtype=torch.bfloat16), "shape"),
        (torch.zeros(1, 40962, dtype=torch.bfloat16), "shape"),
        (torch.zeros(2, 64, 2, dtype=torch.bfloat16)[..., 0], "strides"),
        (torch.zeros(2, 3, 64, dtype=torch.bfloat16).transpose(0, 1), "strides"),
        (torch.zeros(2, 4, 64, dtype=torch.bfloat16)[:, 1:], "strides"),
        (torch.zeros(1, 64, dtype=torch.bfloat16).expand(3, 64), "strides"),
        (torch.zeros(100, dtype=torch.bfloat16).as_strided((3, 64), (8, 1)), "strides"),
    ],
    ids=["dtype", "scalar", "wide", "last stride", "batch inside", "batch apart", "expanded", "overlap"],
)
def test_refusals_name_the_argument(kernels, site, x, fault):
    name = {"quantize_rows": "x", "swiglu_quantize_rows": "packed"}[site]
    refusal = kernels[site].refuses(x)
    assert refusal.startswith(f"{name}: ")
    assert fault in refusal


def test_an_odd_width_has_no_halves(kernels):
    assert "odd" in kernels["swiglu_quantize_rows"].refuses(torch.zeros(2, 63, dtype=torch.bfloat16))


def test_integer_rounding_to_e4m3_is_nearest_even_everywhere(kernels):
    """Every bf16 number up to 448 with every kind of remainder, and NaN."""
    global tl, round_to_e4m3  # the interpreter looks names up in the module
    import triton
    import triton.language as tl

    from accel.fusion.kernels.quantize_rows import round_to_e4m3

    @triton.jit
    def round_all(out, x, block: tl.constexpr):
        index = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(out + index, round_to_e4m3(tl.load(x + index)))

    upper = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    bits = (upper | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).flatten()
    x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    x = x.where((x.abs() <= 448) | x.isnan(), 0.0)
    out = torch.empty(x.shape, dtype=torch.uint8)
    round_all[(x.numel() // 4096,)](out, x, block=4096)
    assert first_mismatch(x.to(torch.float8_e4m3fn), out.view(torch.float8_e4m3fn)) is None
