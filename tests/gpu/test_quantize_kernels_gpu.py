"""Row quantisation to FP8 against eager on a CUDA device: whole tensors, bit for bit.

Run with `python -m pytest tests/gpu/test_quantize_kernels_gpu.py -m gpu`.
"""

import pytest
import torch

pytest.importorskip("triton")

from gpu_kernel_harness import assert_exact

from accel.fusion import references
from accel.fusion.compare import first_mismatch
from accel.fusion.gate import Gate
from accel.fusion.registry import get
from accel.fusion.stress import stress_calls
from pipelines.flux3_action.fp8 import Fp8Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SITES = ("quantize_rows", "swiglu_quantize_rows")
WIDTH, HIDDEN = 3072, 9216
PROJECTION = 3 * WIDTH + 2 * HIDDEN


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def argument(site, *, batch=1, tokens=127):
    """Attention's output as it is; gate and value inside the packed projection of a block."""
    if site == "quantize_rows":
        return randn(batch, tokens, WIDTH)
    return randn(batch, tokens, PROJECTION)[..., 3 * WIDTH :]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 127, 3173])
def test_exact_at_model_shapes(site, batch, tokens):
    assert_exact(site, (argument(site, batch=batch, tokens=tokens),))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("width", [2, 100, 512, 1026, 9216, 12288, 16384, 20480])
def test_exact_at_any_width_and_offset(site, width):
    width = 2 * width if site == "swiglu_quantize_rows" else width
    assert_exact(site, (randn(3, 17, width),))
    assert_exact(site, (randn(17, width + 3)[:, 3:],))
    assert_exact(site, (randn(1, 18, width)[:, 1:],))


@pytest.mark.parametrize("site", SITES)
def test_exact_on_stress_vectors(site):
    for call in stress_calls((argument(site, tokens=64),)):
        assert_exact(site, call)


def test_swiglu_on_every_encoding():
    assert_exact("swiglu_quantize_rows", get("swiglu_quantize_rows").load().proof(torch.bfloat16, "cuda"))


def test_every_encoding_is_rounded_as_eager_rounds_it():
    """All bf16 numbers up to 448 * 2**k, the largest of each row: all quotients that rows can have."""
    encodings = torch.arange(2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    for exponent in range(-8, 8):
        largest = 448.0 * 2.0**exponent
        x = torch.zeros(4, 8192, device="cuda", dtype=torch.bfloat16)
        x.view(-1).copy_(encodings.where(encodings <= largest, 0.0))
        x[:, 0] = largest
        assert_exact("quantize_rows", (x,))
        assert_exact("quantize_rows", (-x,))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("batch", [1, 2])
def test_verified_kernel_is_captured_and_replays_equal(site, batch):
    gate, x = Gate(get(site)), argument(site, batch=batch)
    first, outcome = gate.run(x)
    assert outcome.fused, outcome.detail
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, outcome = gate.run(x)
    assert outcome.fused
    graph.replay()
    assert first_mismatch(first, captured) is None
    x.normal_()
    graph.replay()
    assert first_mismatch(get(site).reference(x), captured) is None


@pytest.mark.parametrize("rows", [1, 15, 127])
def test_a_linear_has_the_same_bits_from_the_kernel(rows):
    linear = Fp8Linear(HIDDEN, WIDTH).cuda()
    values, scale = references.quantize_rows(torch.randn(WIDTH, HIDDEN, device="cuda"))
    linear.weight.copy_(values)
    linear.weight_scale.copy_(scale)
    packed = argument("swiglu_quantize_rows", tokens=rows)
    fused = linear._product(*get("swiglu_quantize_rows").load().run(packed), packed.dtype)
    assert torch.equal(fused, linear(references.swiglu(packed)))
