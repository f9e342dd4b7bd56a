"""Loops: every way to capture one gives the values of the plain loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import pytest
import torch
from solver_stage import Carry, Solver, Step, same, steps_that_remember, unbound
from torch import Tensor, nn

from accel.graphs import buffers
from accel.graphs.buffers import StaticInputs
from accel.graphs.recording import RecordingBackend
from accel.loops import iterate
from accel.policy import AccelPolicy
from accel.record import Kind, Outcome, Reason
from accel.region import LoopMode, loop_body
from accel.runner import Runner

CPU = torch.device("cpu")
MODES: tuple[LoopMode, ...] = get_args(LoopMode)
RNG = torch.Generator().manual_seed(0)


def steps_of(n: int) -> tuple[Step, ...]:
    return steps_that_remember([torch.randn((), generator=RNG) for _ in range(n)])


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG)


def policy(mode: str, **changes: Any) -> AccelPolicy:
    settings: dict[str, Any] = dict(
        name="test", enable_cuda_graph=True, graph_mode="full", max_entries=16, max_segments=8,
        on_full="eager", loop=mode, strict=False, fused={}, stages={},
    )  # fmt: skip
    return AccelPolicy(**settings | changes)


def bound(mode: str, backend: Any = None, **changes: Any) -> tuple[Solver, Runner]:
    stage = Solver()
    runner = Runner(policy(mode, **changes), device=CPU, backend=backend or RecordingBackend())
    runner.bind(stage)
    return stage, runner


def plain(stage: Solver, *args: Any, **options: Any) -> Carry:
    return unbound(stage).run(*args, **options)


def kinds(runner: Runner) -> dict[Kind, int]:
    counts = dict.fromkeys(Kind, 0)
    for outcome, n in runner.record.stage("denoising").outcomes.items():
        counts[outcome.kind] += n
    return counts


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode])
def gradless(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@pytest.mark.parametrize("mode", MODES)
def test_any_order_of_requests_gives_the_plain_values(mode: str) -> None:
    stage, runner = bound(mode)
    lengths, gains = (5, 1, 8, 2, 5, 3, 8, 1, 6), (1.0, 0.5)
    requests = [((x_of(2, 4), steps_of(n), x_of(2, 4)), gains[i % 2]) for i, n in enumerate(lengths * 2)]
    results = [stage.run(*args, gain=gain) for args, gain in requests]
    # Compared at the end: what earlier requests got must survive the later ones.
    for result, (args, gain) in zip(results, requests, strict=True):
        assert same(result, plain(stage, *args, gain=gain))
    assert kinds(runner)[Kind.EAGER] == 0
    assert kinds(runner)[Kind.REPLAYED] > 0


@pytest.mark.parametrize(("mode", "captured", "replayed"), [("step", 4, 6), ("chain", 4, 6), ("whole", 1, 1)])
def test_what_a_request_of_five_steps_takes(mode: str, captured: int, replayed: int) -> None:
    """First, second and last step have a graph of their own; those between share one."""
    backend = RecordingBackend()
    stage, runner = bound(mode, backend)
    for _ in range(2):
        stage.run(x_of(1, 4), steps_of(5), x_of(1, 4))
    assert kinds(runner) == {**dict.fromkeys(Kind, 0), Kind.CAPTURED: captured, Kind.REPLAYED: replayed}
    assert backend.captures == captured


@pytest.mark.parametrize("mode", ["auto", *MODES])
def test_progress_is_told_once_a_step(mode: str) -> None:
    stage, _ = bound(mode)
    for _ in range(2):
        seen: list[int] = []
        stage.run(x_of(1, 4), steps_of(7), x_of(1, 4), on_step=lambda seen=seen: seen.append(1))
        assert len(seen) == 7


def test_auto_is_what_the_body_says() -> None:
    stage, runner = bound("auto")
    stage.run(x_of(1, 4), steps_of(6), x_of(1, 4))
    assert kinds(runner)[Kind.CAPTURED] == 1
    assert kinds(runner)[Kind.REPLAYED] == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_single_call_of_the_body_is_a_loop_of_one_step(mode: str) -> None:
    stage, _ = bound(mode)
    carry, shared = Carry(x_of(1, 4)), x_of(1, 4)
    for step in steps_of(3):
        expected = unbound(stage).advance(carry, step, shared, gain=0.3)
        carry = stage.advance(carry, step, shared, gain=0.3)
        assert same(carry, expected)


def test_a_chain_finds_its_carry_in_place_between_equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = bound("chain")
    stage.run(x_of(1, 4), steps_of(9), x_of(1, 4))
    foreign: list[int] = []
    fill = StaticInputs.fill

    def counting(self: StaticInputs, tensors: Sequence[Tensor], *args: Any) -> Any:
        foreign.append(sum(t is not b for t, b in zip(tensors, self.buffers, strict=True)))
        return fill(self, tensors, *args)

    monkeypatch.setattr(StaticInputs, "fill", counting)
    stage.run(x_of(1, 4), steps_of(9), x_of(1, 4))
    # Besides the step's scale and `shared`: x; then x, one of history and start; then two of history.
    assert [n - 2 for n in foreign] == [1, 3, 4, 0, 0, 0, 0, 0, 4]


def test_a_chain_copies_what_its_steps_share_once_for_each_kind_of_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, _ = bound("chain")
    x, steps, shared = x_of(1, 4), steps_of(9), x_of(1, 4)
    stage.run(x, steps, shared)
    sources: list[Tensor] = []
    copy = buffers._copy

    def noting(pairs: list[tuple[Tensor, Tensor]]) -> None:
        sources.extend(source for _, source in pairs)
        copy(pairs)

    monkeypatch.setattr(buffers, "_copy", noting)
    stage.run(x, steps, shared)
    assert sum(source is shared for source in sources) == 4  # first, second, six alike, last
    shared.mul_(2)
    assert same(stage.run(x, steps, shared), plain(stage, x, steps, shared))
    assert same(stage.run(shared, steps, shared), plain(stage, shared, steps, shared))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_tensors_may_be_passed_again(mode: str) -> None:
    """Whatever a graph did to its own memory, the caller's tensors are what counts."""
    stage, _ = bound(mode)
    x, steps, shared = x_of(1, 4), steps_of(6), x_of(1, 4)
    expected = plain(stage, x, steps, shared)
    assert all(same(stage.run(x, steps, shared), expected) for _ in range(4))


class Euler:
    """A stage whose carry never changes its form and passes one of its tensors through."""

    name = "denoising"

    def modules(self) -> Mapping[str, nn.Module]:
        return {}

    def mounts(self, allowed: frozenset[str]) -> tuple[()]:
        return ()

    @loop_body("chain")
    def advance(self, carry: dict[str, Any], step: Tensor, shared: Tensor) -> dict[str, Any]:
        x, halves = carry["x"], carry["halves"]
        return {
            "x": x + step * shared,
            "halves": (halves[1], halves[0].expand(2, 4) + x),  # they change places
            "mask": carry["mask"],
            "n": carry["n"],
        }


@pytest.mark.parametrize("mode", MODES)
def test_values_that_change_places_and_values_that_stay(mode: str) -> None:
    stage = Euler()
    Runner(policy(mode), device=CPU, backend=RecordingBackend()).bind(stage)
    for _ in range(3):
        carry: dict[str, Any] = {
            "x": x_of(2, 4),
            "halves": (x_of(2, 4), x_of(2, 4)),
            "mask": x_of(1, 4).expand(2, 4) > 0,
            "n": 3,
        }
        steps, shared = tuple(x_of(5)), x_of(2, 4)
        got = iterate(stage.advance, carry, steps, shared)
        want = iterate(Euler().advance, carry, steps, shared)
        assert torch.equal(got["x"], want["x"])
        assert all(map(torch.equal, got["halves"], want["halves"]))
        assert torch.equal(got["mask"], want["mask"])
        assert got["n"] == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("on_full", ["eager", "evict"])
def test_too_few_entries_cost_speed_alone(mode: str, on_full: str) -> None:
    stage, runner = bound(mode, max_entries=1, on_full=on_full)
    for n in (5, 3, 6, 5, 4, 6, 3):
        args = (x_of(1, 4), steps_of(n), x_of(1, 4))
        assert same(stage.run(*args), plain(stage, *args))
    record = runner.record.stage("denoising")
    assert record.entries == 1
    assert (record.evictions > 0) == (on_full == "evict")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fail_at", [0, 1, 3, 5])
def test_captures_that_fail_leave_the_plain_values(mode: str, fail_at: int) -> None:
    backend = RecordingBackend(fail_at=fail_at)
    stage, runner = bound(mode, backend)
    for _ in range(3):
        args = (x_of(1, 4), steps_of(7), x_of(1, 4))
        assert same(stage.run(*args), plain(stage, *args))
    assert kinds(runner)[Kind.EAGER] > 0


@pytest.mark.parametrize("mode", MODES)
def test_weights_may_change_between_requests(mode: str) -> None:
    stage, _ = bound(mode)
    for _ in range(3):
        stage.net.weight = nn.Parameter(x_of(4, 4), requires_grad=False)
        args = (x_of(1, 4), steps_of(6), x_of(1, 4))
        assert same(stage.run(*args), plain(stage, *args))


@pytest.mark.parametrize("mode", MODES)
def test_inside_another_region_a_loop_is_part_of_that_region(mode: str) -> None:
    stage, runner = bound(mode)
    for _ in range(3):
        x = x_of(2, 4)
        assert torch.equal(stage.decode(x), unbound(stage).decode(x))
    outcomes = runner.record.stage("denoising").outcomes
    assert outcomes[Outcome(Kind.REPLAYED)] == 2
    assert {outcome.reason for outcome in outcomes} <= {None, Reason.NESTED_CAPTURE}
    assert runner.strict_violations() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_may_run_itself_between_its_steps(mode: str) -> None:
    """E.g. for a preview. In a thread of its own, for a lock that waits for itself would wait for ever."""
    stage, _ = bound(mode)
    args, other = (x_of(1, 4), steps_of(5), x_of(1, 4)), (x_of(1, 4), steps_of(5), x_of(1, 4))
    results: list[Carry] = []
    inner: list[Carry] = []

    @torch.no_grad()
    def work() -> None:
        for _ in range(2):
            results.append(stage.run(*args, on_step=lambda: inner.append(stage.run(*other))))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert all(same(result, plain(stage, *args)) for result in results)
    assert all(same(result, plain(stage, *other)) for result in inner)
    assert (len(results), len(inner)) == (2, 10)


def test_a_step_outside_of_a_loop_takes_nothing_for_unchanged() -> None:
    stage, runner = bound("chain")
    step, carry = Step(x_of(1), 0), Carry(x_of(1, 4))
    stage.advance(carry, step, x_of(1, 4), gain=1.0)
    (call,) = (region.call for region in runner.regions if region.name == "advance")
    for _ in range(3):
        shared = x_of(1, 4)
        expected = unbound(stage).advance(carry, step, shared, gain=1.0)
        assert torch.equal(call(carry, step, shared, gain=1.0).x, expected.x)


@pytest.mark.parametrize("mode", MODES)
def test_without_graphs_every_step_runs_plainly(mode: str) -> None:
    stage, runner = bound(mode, enable_cuda_graph=False)
    args = (x_of(1, 4), steps_of(5), x_of(1, 4))
    assert same(stage.run(*args), plain(stage, *args))
    assert runner.record.stage("denoising").outcomes == {Outcome(Kind.EAGER, Reason.DISABLED): 5}


@pytest.mark.parametrize("mode", MODES)
def test_threads_that_share_a_loop_get_their_own_values(mode: str) -> None:
    stage, _ = bound(mode)
    wrong: list[int] = []
    requests = [(x_of(1, 4), steps_of(5), x_of(1, 4)) for _ in range(6)]
    expected = [plain(stage, *request) for request in requests]

    @torch.no_grad()
    def work(offset: int) -> None:
        for i in range(12):
            k = (i + offset) % len(requests)
            if not same(stage.run(*requests[k]), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(2 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_errors_of_the_body_reach_the_caller_and_leave_the_loop_usable() -> None:
    stage, _ = bound("chain")
    steps, shared = steps_of(4), x_of(1, 4)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        stage.run(x_of(1, 3), steps, shared)
    args = (x_of(1, 4), steps, shared)
    assert same(stage.run(*args), plain(stage, *args))
