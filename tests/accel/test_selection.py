"""Choosing from measurements: what holds whatever was measured, and the reasons that are given."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.graphs.stats import MIN_GAIN
from accel.policy import AccelPolicy, StageOverride
from accel.selection import (
    MAX_REGRET,
    OFF,
    Candidate,
    Measured,
    StageMeasurements,
    policy_of,
    select,
)

FULL = Candidate(graphs="full")
FUSED = Candidate(fused=True)
BOTH = Candidate(graphs="full", fused=True)
SEGMENTED = Candidate(graphs="segmented", fused=True)
CANDIDATES = [
    OFF,
    FUSED,
    *(
        Candidate(graphs=graphs, loop=loop, fused=fused)
        for graphs, loop, fused in product(("full", "segmented"), ("step", "chain", "whole"), (False, True))
    ),
]
MIB = 1 << 20


def stage(
    *relative: tuple[Candidate, float],
    eager_ms: float = 10.0,
    held_mb: int = 100,
    in_every_request: bool = True,
    has_loop: bool = True,
) -> StageMeasurements:
    """Candidates other than `OFF` hold `held_mb`."""
    measured = {c: Measured(relative=r, calls=10, held_bytes=held_mb * MIB) for c, r in relative}
    off = Measured(relative=1.0, calls=10)
    return StageMeasurements(
        eager_ms=eager_ms,
        in_every_request=in_every_request,
        has_loop=has_loop,
        by_candidate={OFF: off} | measured,
    )


def choice_of(measured: StageMeasurements, memory_budget_mb: int | None = None) -> tuple[Candidate, str]:
    choice = select({"denoising": measured}, memory_budget_mb=memory_budget_mb)["denoising"]
    return choice.candidate, choice.reason


# One stage


@pytest.mark.parametrize(
    ("relative", "expected", "reason"),
    [
        ([(FULL, 0.6), (BOTH, 0.5)], BOTH, "saves 50.0 %, the most"),
        (
            [(FULL, 0.6), (BOTH, 0.599)],
            FULL,
            "saves 40.0 %; full graphs + fused, 40.1 %, gains not over 3 % on it",
        ),
        ([(FULL, 1.2), (BOTH, 1.001)], OFF, "nothing is faster"),
        ([(FULL, 0.985)], OFF, "full graphs saves 1.5 %, not over 3 %"),
        ([], OFF, "nothing else was measured"),
    ],
)
def test_the_simplest_that_none_beats_by_more_than_three_percent(
    relative: list[tuple[Candidate, float]], expected: Candidate, reason: str
) -> None:
    assert choice_of(stage(*relative)) == (expected, reason)


def test_what_holds_too_much_memory_is_out_and_named() -> None:
    assert choice_of(stage((BOTH, 0.5), held_mb=101), 100) == (
        OFF,
        "nothing is faster; over the memory budget: full graphs + fused",
    )
    assert choice_of(stage((BOTH, 0.5), held_mb=100), 100)[0] == BOTH


def test_a_loop_mode_is_named_only_where_there_is_a_loop() -> None:
    whole = Candidate(graphs="full", loop="whole")
    assert choice_of(stage((whole, 0.5)))[0] == whole
    assert choice_of(stage((whole, 0.5), has_loop=False))[0] == FULL


def test_candidates_are_said_in_words() -> None:
    assert (
        str(Candidate(graphs="segmented", loop="chain", fused=True))
        == "segmented graphs (loop: chain) + fused"
    )
    assert (str(OFF), str(FUSED)) == ("off", "fused")


# All stages


def test_small_losses_may_not_add_up() -> None:
    """Each stage alone would stay off; together they would lose 2.9 % to graphs everywhere."""
    alike = {name: stage((FULL, 0.972)) for name in "ab"}
    assert {choice.candidate for choice in select(alike, memory_budget_mb=None).values()} == {OFF, FULL}


def test_a_stage_that_keeps_its_results_does_not_count_for_requests() -> None:
    kept = {"text": stage((FULL, 0.972), in_every_request=False), "vae": stage((FULL, 1.1))}
    assert {choice.candidate for choice in select(kept, memory_budget_mb=None).values()} == {OFF}


relatives = st.floats(0.2, 1.5)


@st.composite
def measurements(draw: st.DrawFn) -> dict[str, StageMeasurements]:
    """Up to four stages with the same candidates."""
    tried = draw(st.lists(st.sampled_from(CANDIDATES[1:]), unique=True))
    return {
        name: stage(
            *((candidate, draw(relatives)) for candidate in tried),
            eager_ms=draw(st.floats(0.01, 1000)),
            held_mb=draw(st.integers(0, 200)),
            in_every_request=draw(st.booleans()),
        )
        for name in "abcd"[: draw(st.integers(1, 4))]
    }


budgets = st.none() | st.integers(1, 200)


@given(measurements(), budgets)
def test_equal_measurements_give_equal_choices_in_any_order(
    stages: dict[str, StageMeasurements], budget: int | None
) -> None:
    turned = {
        name: replace(each, by_candidate=dict(reversed(each.by_candidate.items())))
        for name, each in reversed(stages.items())
    }
    first, second = (select(each, memory_budget_mb=budget) for each in (stages, turned))
    assert {name: c.candidate for name, c in first.items()} == {
        name: c.candidate for name, c in second.items()
    }


@given(measurements(), budgets)
def test_no_choice_holds_more_than_the_budget(
    stages: dict[str, StageMeasurements], budget: int | None
) -> None:
    for choice in select(stages, memory_budget_mb=budget).values():
        assert choice.measured is not None
        assert budget is None or choice.measured.held_bytes <= budget * MIB


@given(measurements(), budgets)
def test_requests_lose_little_to_any_policy_that_is_the_same_for_all_stages(
    stages: dict[str, StageMeasurements], budget: int | None
) -> None:
    chosen = select(stages, memory_budget_mb=budget)
    counted = {name: each for name, each in stages.items() if each.in_every_request}
    total = sum(each.ms(chosen[name].candidate) for name, each in counted.items())
    limit = float("inf") if budget is None else budget * MIB
    for candidate in CANDIDATES:
        measured = [each.by_candidate.get(candidate) for each in counted.values()]
        if all(m is not None and m.held_bytes <= limit for m in measured):
            fixed = sum(each.ms(candidate) for each in counted.values())
            assert total <= fixed * (1 + MAX_REGRET) * (1 + 1e-9)


@given(measurements())
def test_no_stage_is_beaten_by_more_than_the_least_gain(stages: dict[str, StageMeasurements]) -> None:
    for name, choice in select(stages, memory_budget_mb=None).items():
        fastest = min(measured.relative for measured in stages[name].by_candidate.values())
        assert choice.measured is not None
        assert choice.measured.relative * (1 - MIN_GAIN) <= fastest


@given(st.lists(st.tuples(st.sampled_from(CANDIDATES[1:]), relatives), min_size=1), st.floats(0.1, 1.0))
def test_a_chosen_candidate_that_gets_faster_stays_chosen(
    relative: list[tuple[Candidate, float]], factor: float
) -> None:
    """Requests do not count the stage, so that it is judged alone."""
    before = stage(*relative, in_every_request=False)
    chosen, _ = choice_of(before)
    faster = replace(before.by_candidate[chosen], relative=before.by_candidate[chosen].relative * factor)
    assert choice_of(replace(before, by_candidate={**before.by_candidate, chosen: faster}))[0] == chosen


@given(measurements(), st.integers(1, 200), st.integers(0, 100))
def test_a_larger_budget_makes_no_stage_slower_by_more_than_the_least_gain(
    stages: dict[str, StageMeasurements], budget: int, more: int
) -> None:
    small, large = (select(stages, memory_budget_mb=limit) for limit in (budget, budget + more))
    for name, each in stages.items():
        before, after = each.ms(small[name].candidate), each.ms(large[name].candidate)
        assert after * (1 - MIN_GAIN) <= before


# Policies


def policy(**changes: Any) -> AccelPolicy:
    settings: dict[str, Any] = dict(
        name="auto", enable_cuda_graph=True, graph_mode="full", max_entries=4, max_segments=8,
        on_full="eager", auto_seconds=60.0, strict=False, stages={},
        fused={"swiglu": True, "modulate": False},
    )  # fmt: skip
    return AccelPolicy(**settings | changes)


def test_a_policy_does_to_each_stage_what_was_chosen() -> None:
    whole = Candidate(graphs="full", loop="whole", fused=True)
    chosen = policy_of(policy(), {"vae": OFF, "denoising": whole, "text": SEGMENTED})
    assert chosen.auto_seconds is None
    vae, denoising, text = map(chosen.for_stage, ("vae", "denoising", "text"))
    assert not vae.enable_cuda_graph
    assert not any(vae.fused.values())
    assert (denoising.enable_cuda_graph, denoising.graph_mode, denoising.loop) == (True, "full", "whole")
    assert denoising.fused == {"swiglu": True, "modulate": False}
    assert text.graph_mode == "segmented"


def test_a_policy_of_stages_that_are_off_is_off() -> None:
    chosen = policy_of(policy(), {"vae": OFF})
    assert not chosen.enable_cuda_graph
    assert not any(chosen.fused.values())


def test_what_the_user_sets_for_a_stage_stays_whatever_else_is_chosen() -> None:
    base = policy(stages={"vae": StageOverride(graph_mode="segmented")})
    chosen = policy_of(base, {"denoising": OFF})
    assert chosen.for_stage("vae") == base.for_stage("vae")
