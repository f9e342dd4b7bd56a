"""Fused kernels against eager on a CUDA device: whole tensors, bit for bit.

Run with `python -m pytest tests/gpu/test_kernels_gpu.py -m gpu -s`; `-s` shows the timings.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 - only where triton is
from gpu_kernel_harness import assert_exact  # noqa: E402
from test_rope_and_step_kernels_gpu import ARGUMENTS as ROPE_AND_STEP  # noqa: E402

from accel import fusion  # noqa: E402
from accel.fusion import references  # noqa: E402
from accel.fusion.compare import first_mismatch  # noqa: E402
from accel.fusion.gate import Gate  # noqa: E402
from accel.fusion.kernels.rounding import round_bits_to_bf16, store_as  # noqa: E402
from accel.fusion.registry import get, sites  # noqa: E402
from accel.fusion.scope import fusion_scope  # noqa: E402
from accel.fusion.stress import stress_calls  # noqa: E402
from accel.record import Reason  # noqa: E402
from accel.site_names import SITE_NAMES  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = Path(__file__).parents[1] / "cases"
TOKENS, WIDTH, HIDDEN, HEADS = 3173, 3072, 9216, 24
PROJECTION = 3 * WIDTH + 2 * HIDDEN


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def arguments(site: str, *, batch: int = 1, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16):
    """Arguments as the models make them: chunks of one projection, chunks of one modulation."""
    if site in ROPE_AND_STEP:
        return ROPE_AND_STEP[site](batch=batch, tokens=tokens, dtype=dtype)
    hidden = randn(batch, tokens, WIDTH, dtype=dtype)
    first, second, third = randn(batch, 1, 3 * WIDTH, dtype=dtype).chunk(3, dim=-1)
    if site == "modulate":
        return hidden, first, second
    if site == "gated_residual":
        return hidden, third, torch.randn_like(hidden), torch.randn_like(hidden)
    if site == "layer_norm_modulate":
        return hidden, first, second, None, 1e-6
    if site == "residual_layer_norm_modulate":
        return hidden, third, torch.randn_like(hidden), torch.randn_like(hidden), first, second, None, 1e-6
    if site == "rms_norm_modulate":
        return hidden, first, second, 1e-6
    if site == "residual_rms_norm_modulate":
        return hidden, third, torch.randn_like(hidden), first, second, second, first, 1e-6
    if site == "quantize_rows":
        return (hidden,)
    if site == "group_norm_silu":
        return (
            randn(batch, 256, 64, 96, dtype=dtype),
            32,
            randn(256, dtype=dtype),
            randn(256, dtype=dtype),
            1e-6,
        )
    if site == "channel_norm_silu":
        return randn(batch, 256, 5, 32, 48, dtype=dtype), 1e-8
    projection = randn(batch, tokens, PROJECTION, dtype=dtype)
    if site in ("swiglu", "swiglu_quantize_rows"):
        return (projection[..., 3 * WIDTH :],)
    q, k, _ = (part.unflatten(-1, (HEADS, 128)) for part in projection[..., : 3 * WIDTH].chunk(3, dim=-1))
    angle = torch.rand(batch, tokens, 64, device="cuda") * 100
    return (
        q,
        k,
        randn(128, dtype=dtype),
        randn(128, dtype=dtype),
        torch.cat((angle.cos(), angle.sin()), -1),
        1e-6,
    )


@pytest.mark.parametrize("site", SITE_NAMES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 127, TOKENS])
def test_exact_at_model_shapes(site, batch, tokens):
    if "rms_norm" in site and batch * tokens < 16:
        pytest.skip("ATen's mean adds fewer rows in another order; the kernel refuses them")
    assert_exact(site, arguments(site, batch=batch, tokens=tokens))


@pytest.mark.parametrize(
    ("site", "dtype"), [(site.name, dtype) for site in sites() for dtype in site.dtypes], ids=str
)
def test_exact_in_every_listed_dtype_and_on_stress_vectors(site, dtype):
    args = arguments(site, tokens=64, dtype=dtype)
    assert_exact(site, args)
    for call in stress_calls(get(site).load().shorten(*args)):
        assert_exact(site, call)


def test_exact_per_token_and_without_second_branch():
    hidden = randn(2, 127, WIDTH)
    shift, scale = randn(2, 127, 2 * WIDTH).chunk(2, dim=-1)
    assert_exact("modulate", (hidden, shift, scale))
    assert_exact("gated_residual", (hidden, shift, scale, None))
    assert_exact("modulate", (hidden[:, 5:], shift[:, :1].expand(-1, 122, -1), scale[:, :1]))


@pytest.mark.parametrize("heads", [1, 3, 9, 24])
def test_qk_norm_rope_with_any_number_of_heads(heads):
    q, k, q_scale, k_scale, cos_sin, eps = arguments("qk_norm_rope", tokens=50)
    assert_exact("qk_norm_rope", (q[:, :, :heads], k[:, :, :heads], q_scale, k_scale, cos_sin, eps))


def test_swiglu_on_every_encoding():
    assert_exact("swiglu", get("swiglu").load().proof(torch.bfloat16, torch.device("cuda")))


@triton.jit
def _round_both_ways(cast, integer, x, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + index)
    tl.store(cast + index, store_as(value, tl.bfloat16))
    tl.store(integer + index, round_bits_to_bf16(value))


def test_rounding_by_cast_and_by_integers_is_nearest_even():
    upper = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int32)[:, None] << 16
    remainders = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], device="cuda", dtype=torch.int32)
    x = (upper | remainders).flatten().view(torch.float32)
    cast, integer = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))
    _round_both_ways[(x.numel() // 4096,)](cast, integer, x, block=4096)
    assert first_mismatch(x.bfloat16(), cast) is None
    assert first_mismatch(x.bfloat16(), integer) is None


def test_c10_modulate_rounds_after_every_operation():
    case = json.loads((CASES / "C10_modulate_triples.json").read_text())
    for row in case["rows"]:
        bits = [int(row[f"{name}bits"], 16) for name in ("x_", "shift_", "scale_", "expect_")]
        x, shift, scale, expected = (
            torch.tensor(b, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda().repeat(1, 257, 384)
            for b in bits
        )
        assert first_mismatch(expected, get("modulate").load().run(x, shift, scale)) is None
    a, c = (torch.full((1, 257, 384), case["fp32_fma"][name], device="cuda") for name in "ac")
    assert not get("modulate").load().run(a, c, a - 1).any()


def test_autocast_sees_the_plain_expression():
    gate, args = Gate(get("modulate")), arguments("modulate", tokens=17)
    assert gate.run(*args)[1].fused
    with torch.autocast("cuda", torch.float16):
        assert gate.run(*args)[1].reason is Reason.UNSUPPORTED_INPUT
    assert gate.run(*args)[1].fused


def test_c11i_capture_records_the_reference_and_verifies_nothing():
    gate, args = Gate(get("modulate")), arguments("modulate", tokens=17)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, outcome = gate.run(*args)
    graph.replay()
    assert outcome.reason is Reason.UNVERIFIED
    assert gate.stats().verified == 0
    assert torch.equal(captured, references.modulate(*args))


@pytest.mark.parametrize("site", SITE_NAMES)
def test_verified_kernel_is_captured_and_replays_equal(site):
    gate, args = Gate(get(site)), arguments(site, tokens=127)
    first, outcome = gate.run(*args)
    assert outcome.fused, outcome.detail
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, outcome = gate.run(*args)
    assert outcome.fused
    graph.replay()
    assert first_mismatch(first, captured) is None
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg.normal_()
    graph.replay()
    assert first_mismatch(get(site).reference(*args), captured) is None
    print(f"\n{site}: verification {gate.stats().verify_ms:.0f} ms", end="")


def test_c12_every_layout_gives_eager_values_through_the_scope():
    base = torch.arange(48.0, device="cuda").bfloat16().reshape(4, 12)
    flat = torch.arange(25.0, device="cuda").bfloat16()
    odd_batch = torch.empty_strided((1, 4, 12), (7, 12, 1), dtype=torch.bfloat16, device="cuda").copy_(base)
    layouts = {
        "a": base[:, ::2],
        "a, three dimensions": base[None, :, ::2],
        "b": torch.arange(24.0, device="cuda").bfloat16().reshape(6, 4).t()[None],
        "c": base.chunk(6, dim=-1)[1][None],
        "d": base.view(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "e": flat[1:].view(1, 4, 6),
        "g": odd_batch,
        "rows": base.view(2, 2, 12)[..., 3:9],
        "batch inside": base.view(2, 2, 12).transpose(0, 1),
    }
    outcomes = []
    with fusion_scope(frozenset(SITE_NAMES), outcomes.append):
        for name, x in layouts.items():
            one = torch.ones(x.shape, dtype=x.dtype, device="cuda")
            for _ in range(2):
                mismatch = first_mismatch(
                    references.modulate(x, 3 * one, one), fusion.modulate(x, 3 * one, one)
                )
                assert mismatch is None, f"{name}: {mismatch}"
        shift, scale = (
            torch.cat((torch.full((1, 4, 36), 3.0), torch.ones(1, 4, 36)), -1).bfloat16().cuda().chunk(2, -1)
        )
        got = fusion.modulate(base[None], shift[..., :12], scale[..., :12])  # f
        assert torch.equal(got, 2 * base[None] + 3)
    assert {outcome.reason for outcome in outcomes} == {None, Reason.UNSUPPORTED_INPUT}


def microseconds(call: Callable[[], object]) -> float:
    """Median device time of one call, launches excluded by replaying ten in a graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(100 * start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


@pytest.mark.parametrize("site", SITE_NAMES)
def test_fused_is_faster_than_eager(site):
    """Prints device time and rate of the least bytes; tensors under 50 MB partly stay in the L2 cache."""
    large = {"group_norm_silu": (1, 128, 1024, 1024), "channel_norm_silu": (1, 128, 121, 128, 192)}
    args = arguments(site)
    if site in large:
        args = (randn(*large[site]), *args[1:])
    if site == "group_norm_silu":
        args = (args[0], 32, randn(128), randn(128), 1e-6)
    least = import_module(f"accel.fusion.kernels.{site}").bytes_moved(*args)
    eager = microseconds(lambda: get(site).reference(*args))
    fused = microseconds(lambda: get(site).load().run(*args))
    print(
        f"\n{site:15s} eager {eager:7.1f} us, fused {fused:6.1f} us ({least / fused / 1e3:5.0f} GB/s), "
        f"{eager / fused:.1f}x",
        end="",
    )
    assert fused < eager
