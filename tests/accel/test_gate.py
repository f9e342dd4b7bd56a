"""The gate lets a candidate through only if nothing about its result differs (case C11)."""

import logging
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from accel.fusion import references
from accel.fusion.gate import Gate, fusion_epoch
from accel.fusion.site import Kernel, Site
from accel.record import Reason


def gate_of(reference, candidate, **kernel_options):
    kernel = Kernel(plan=lambda *_: candidate, **kernel_options)
    return Gate(
        Site(
            name="test_site",
            reference=reference,
            load=lambda: kernel,
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            devices=("cpu",),
        )
    )


def triple(x):
    return x * 3


X = torch.linspace(-2, 2, 12).reshape(3, 4)


def assert_rejected(gate, x, reason=Reason.MISMATCH):
    expected = gate.site.reference(x)
    for _ in range(2):  # once found wrong, never again
        value, outcome = gate.run(x)
        assert (outcome.fused, outcome.reason) == (False, reason)
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
    assert gate.stats().verified == 0


def test_c11a_nan_equals_nan():
    gate = gate_of(lambda x: x / 0 * 0, lambda x: x * torch.nan)
    assert gate.run(X)[1].fused


def test_c11b_negative_zero_is_not_zero():
    gate = gate_of(lambda x: x * 0.0 - 0.0, lambda x: (x * 0.0 - 0.0).abs())
    assert_rejected(gate, -X.abs() - 1)
    repro = gate.stats().repro
    assert (repro.mismatch.index, repro.mismatch.expected, repro.mismatch.actual) == (
        (0, 0),
        "0x80000000",
        "0x00000000",
    )


def test_c11c_dtype_counts():
    assert_rejected(gate_of(triple, lambda x: triple(x).double()), X)


@pytest.mark.parametrize("reshape", [lambda y: y.unsqueeze(-1), lambda y: y.t().contiguous().t()])
def test_c11d_shape_and_strides_count(reshape):
    assert_rejected(gate_of(triple, lambda x: reshape(triple(x))), X)


@pytest.mark.parametrize(
    ("candidate", "found"),
    [
        (lambda x: (triple(x), x + 2), "output 1 at [0, 0]: expected 0xbf800000, got 0x00000000"),
        (lambda x: triple(x), "output: expected 2 tensors, got 1 tensors"),
    ],
    ids=["second differs", "second missing"],
)
def test_every_output_counts(candidate, found):
    _, outcome = gate_of(lambda x: (triple(x), x + 1), candidate).run(X)
    assert (outcome.reason, outcome.detail) == (Reason.MISMATCH, found)


def test_stride_of_a_dimension_of_size_one_does_not_count():
    gate = gate_of(triple, lambda x: triple(x).as_strided(x.shape, (999, 4, 1)))
    assert gate.run(X.unsqueeze(0))[1].fused


@pytest.mark.parametrize("x", [X, X[:, ::2], X[:1].expand(3, 4)], ids=["dense", "strided", "expanded"])
def test_c11e_written_input_is_put_back(x):
    x = x.clone() if x.is_contiguous() else x
    before = x.clone()

    def candidate(x):
        y = triple(x)
        (x[:1] if 0 in x.stride() else x).fill_(7)
        return y

    gate = gate_of(triple, candidate)
    value, outcome = gate.run(x)
    assert outcome.reason is Reason.MISMATCH
    assert "input 0" in outcome.detail
    assert torch.equal(x, before)
    assert torch.equal(value, triple(before))


def test_c11f_aliases_are_judged_on_values():
    assert gate_of(lambda x: x, lambda x: x).run(X)[1].fused
    assert_rejected(gate_of(triple, lambda x: x), X)


def test_c11g_zeros_alone_prove_nothing():
    gate = gate_of(triple, lambda x: x * 2)
    gate.run(torch.zeros(3, 4))
    value, outcome = gate.run(torch.ones(3, 4))
    assert not outcome.fused
    assert torch.equal(value, torch.full((3, 4), 3.0))


def test_c11h_raising_candidate_runs_once_and_warns_once(caplog):
    calls = []

    def candidate(x):
        calls.append(x)
        raise ValueError("no such layout")

    gate = gate_of(triple, candidate)
    with caplog.at_level(logging.WARNING, "samebit"):
        assert_rejected(gate, X, Reason.KERNEL_ERROR)
    assert len(calls) == 1
    assert len(caplog.records) == 1
    assert "no such layout" in caplog.text


def test_c11i_capture_neither_runs_nor_marks(monkeypatch):
    gate = gate_of(triple, triple)
    with monkeypatch.context() as patch:
        patch.setattr("accel.fusion.gate._is_capturing", lambda args: True)
        assert gate.run(X)[1].reason is Reason.UNVERIFIED
    assert gate.stats().verified == 0
    assert gate.run(X)[1].fused


def test_short_memory_puts_the_proof_off(monkeypatch):
    runs = []
    gate = gate_of(triple, lambda x: runs.append(x) or triple(x))
    with monkeypatch.context() as patch:
        patch.setattr("accel.fusion.gate._has_room_for", lambda expected: False)
        value, outcome = gate.run(X)
    assert (outcome.reason, runs) == (Reason.LOW_MEMORY, [])
    assert torch.equal(value, triple(X))
    assert gate.run(X)[1].fused


def test_running_out_of_memory_is_no_fault_of_the_kernel():
    full = [True]

    def candidate(x):
        if full[0]:
            raise torch.OutOfMemoryError("full")
        return triple(x)

    gate, epoch = gate_of(triple, candidate), fusion_epoch()
    value, outcome = gate.run(X)
    assert outcome.reason is Reason.LOW_MEMORY
    assert torch.equal(value, triple(X))
    full[0] = False
    assert gate.run(X)[1].fused
    full[0] = True
    with pytest.raises(torch.OutOfMemoryError):  # as eager would: whoever calls can free memory
        gate.run(X)
    full[0] = False
    assert gate.run(X)[1].fused
    assert fusion_epoch() == epoch


def test_a_fallback_runs_in_the_place_of_the_reference():
    def parts(x):
        return "parts"

    gate = gate_of(triple, lambda x: x)
    assert gate.run(X.double(), fallback=parts)[0] == "parts"
    assert torch.equal(gate.run(X, fallback=parts)[0], triple(X))  # the reference judges the kernel
    assert gate.run(X, fallback=parts)[0] == "parts"
    assert torch.equal(gate.run(X)[0], triple(X))


def test_the_layouts_kept_are_bounded(monkeypatch):
    monkeypatch.setattr("accel.fusion.gate._MAX_LAYOUTS", 3)
    gate = gate_of(triple, triple)
    for length in [1, 2, 3, 4, 5, 6] * 2:
        assert gate.run(torch.ones(length, 4))[1].fused
        assert len(gate._plans) <= 3


def test_the_signatures_kept_are_bounded(monkeypatch):
    """A number that a client sends, such as the scale of guidance, is part of the signature."""
    monkeypatch.setattr("accel.fusion.gate._MAX_LAYOUTS", 3)
    gate = gate_of(lambda x, scale: x * scale, lambda x, scale: x * scale)
    for scale in [1.5, 2.5, 3.5, 4.5, 5.5] * 2:
        assert gate.run(X, scale)[1].fused
        assert gate.stats().verified <= 3


def test_kernel_that_fails_later_falls_back():
    healthy = [True]

    def candidate(x):
        if not healthy[0]:
            raise RuntimeError("lost")
        return triple(x)

    gate = gate_of(triple, candidate)
    assert gate.run(X)[1].fused
    healthy[0] = False
    value, outcome = gate.run(X)
    assert outcome.reason is Reason.KERNEL_ERROR
    assert torch.equal(value, triple(X))


def test_threads_that_fail_together_switch_off_once(caplog):
    together, failing = threading.Barrier(2, timeout=30), [False]

    def candidate(x):
        if failing[0]:
            together.wait()
            raise RuntimeError("lost")
        return triple(x)

    gate, outcomes = gate_of(triple, candidate), []
    gate.run(X)
    failing[0], epoch = True, fusion_epoch()
    threads = [threading.Thread(target=lambda: outcomes.append(gate.run(X)[1].reason)) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "samebit"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes == [Reason.KERNEL_ERROR] * 2
    assert len(caplog.records) == 1
    assert fusion_epoch() == epoch + 1


@pytest.mark.parametrize(
    "flaw",
    [
        lambda y: torch.where(y.abs() > 1e30, 0.0, y),
        lambda y: torch.where(y.isnan(), 0.0, y),
        lambda y: torch.where((y != 0) & (y.abs() < 1e-37), 0.0, y),
        lambda y: y + 0.0,
    ],
    ids=["overflow", "nan", "subnormal", "signed zero"],
)
def test_stress_vectors_find_what_the_first_call_hides(flaw):
    assert_rejected(gate_of(triple, lambda x: flaw(triple(x))), X + 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_proof_covers_every_encoding(dtype):
    def proof(dtype, device):
        return (torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype).view(64, 1024),)

    silu = torch.nn.functional.silu
    odd_one = torch.tensor(0x3A5B, dtype=torch.int16).view(dtype)
    wrong_once = gate_of(silu, lambda x: torch.where(x == odd_one, 0, silu(x)), proof=proof)
    assert wrong_once.run(X.to(dtype))[1].reason is Reason.MISMATCH
    assert gate_of(silu, silu, proof=proof).run(X.to(dtype))[1].fused


def test_every_layout_is_verified_but_not_every_length():
    runs = []
    gate = gate_of(triple, lambda x: runs.append(x) or triple(x))
    wide = torch.randn(1, 40, 32)
    gate.run(wide[..., :16].contiguous())
    first_sight = len(runs)
    gate.run(wide[:, :33, :16].contiguous())
    assert len(runs) == first_sight + 1
    assert gate.stats().verified == 1
    gate.run(wide[..., :16])  # other row stride
    gate.run(wide[:, :15, :16].contiguous())  # other reduction regime
    gate.run(wide[..., :8].contiguous())  # other width
    gate.run(torch.empty(641)[1:].view(1, 40, 16).copy_(wide[..., :16]))  # other alignment
    assert gate.stats().verified == 5


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((X.as_subclass(Subclass),), "tensor subclass Subclass"),
        ((X, X.as_subclass(Subclass)), "tensor subclass Subclass"),
        ((X, X.to("meta")), "tensors on cpu and meta"),
        ((X[:0],), "empty tensor"),
        ((X.to(torch.int64),), "dtype torch.int64"),
    ],
    ids=["subclass", "second subclass", "two devices", "empty", "dtype"],
)
def test_tensors_that_no_kernel_takes_go_to_the_reference(args, why):
    runs = []
    gate = gate_of(lambda *args: "reference", lambda *args: runs.append(args))
    for _ in range(2):
        value, outcome = gate.run(*args)
        assert (value, outcome.reason, outcome.detail) == ("reference", Reason.UNSUPPORTED_INPUT, why)
    assert runs == []


def test_calls_that_must_see_the_plain_expression():
    gate = gate_of(triple, triple)
    assert gate.run(X.clone().requires_grad_())[1].reason is Reason.GRAD_ENABLED
    with torch.no_grad():
        assert gate.run(X.clone().requires_grad_())[1].fused
    assert gate.run(X.double())[1].reason is Reason.UNSUPPORTED_INPUT
    assert gate.run(X.to("meta"))[1].reason is Reason.NO_CUDA
    with torch._subclasses.FakeTensorMode():
        assert gate.run(torch.empty(3, 4))[1].reason is Reason.TRACING
    seen = []
    torch.func.vmap(lambda row: seen.append(gate.run(row)[1].reason) or row)(X)
    assert seen == [Reason.TRACING]


@pytest.mark.parametrize("trace", [make_fx, lambda fn: lambda x: torch.jit.trace(fn, x, check_trace=False)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracers_see_the_plain_expression(trace):
    """They record operators of torch, so what a kernel writes would be missing from the trace."""
    gate, seen = gate_of(triple, triple), []
    gate.run(X)

    def traced(x):
        value, outcome = gate.run(x)
        seen.append(outcome.reason)
        return value

    trace(traced)(X)
    assert set(seen) == {Reason.TRACING}


def test_fake_cuda_tensors_need_no_cuda():
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3, 4, device="cuda")
        assert gate_of(triple, triple).run(fake)[1].reason is Reason.TRACING


def test_epoch_moves_when_a_kernel_is_switched_off_and_random_state_never_does():
    epoch, state = fusion_epoch(), torch.get_rng_state()
    good, bad = gate_of(triple, triple), gate_of(triple, lambda x: x)
    good.run(X)
    good.run(X)
    assert fusion_epoch() == epoch
    bad.run(X)
    assert fusion_epoch() == epoch + 1
    assert torch.equal(torch.get_rng_state(), state)


def test_missing_triton_is_named():
    def load():
        raise ImportError("No module named 'triton'")

    site = Site(name="s", reference=triple, load=load, dtypes=(torch.float32,), devices=("cpu",))
    value, outcome = Gate(site).run(X)
    assert outcome.reason is Reason.NO_TRITON
    assert outcome.detail == "No module named 'triton'; install the `kernels` extra"
    assert torch.equal(value, triple(X))


def test_c10_more_precise_candidate_is_rejected():
    x, scale, shift = (torch.full((1, 4, 8), value).bfloat16() for value in (3.0, 0.01, -3.0))
    gate = gate_of(
        references.modulate,
        lambda x, shift, scale: ((1 + scale.float()) * x.float() + shift.float()).bfloat16(),
    )
    value, outcome = gate.run(x, shift, scale)
    assert outcome.reason is Reason.MISMATCH
    assert (value == 0.03125).all()


def test_stats_count_by_reason():
    gate = gate_of(triple, triple)
    for _ in range(3):
        gate.run(X)
    gate.run(X.double())
    assert gate.stats().calls == {None: 3, Reason.UNSUPPORTED_INPUT: 1}
    assert gate.stats().verify_ms > 0
