"""The gate lets a candidate through only if nothing about its result differs (case C11)."""

import logging

import pytest
import torch

from accel.fusion import references
from accel.fusion.gate import Gate, fusion_epoch
from accel.fusion.site import Kernel, Site
from accel.record import Reason


def gate_of(reference, candidate, **kernel_options):
    kernel = Kernel(run=candidate, **kernel_options)
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
