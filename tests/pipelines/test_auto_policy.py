"""accel=auto on scripted times, and on real stages with recorded graphs."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import yaml
from scripted_pipeline import DESCRIPTION, Denoising, Output, Vae, World, ideal, policy

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy, StageOverride, StagePolicy
from accel.record import Kind, Outcome, Reason
from accel.runner import Runner
from accel.selection import OFF, Candidate
from pipelines.auto_policy import CALLS, CALLS_TO_LOSE, LEAST_CALLS, candidates, choose, measure
from pipelines.pipeline import Pipeline
from pipelines.policy_file import policy_yaml
from pipelines.progress import Progress
from stages.stage import State

# As they are tried: the model prefers the whole loop.
WHOLE, STEP, CHAIN = (Candidate(graphs="full", loop=loop, fused=True) for loop in ("whole", "step", "chain"))


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here holds device memory, and the heap of a test session takes long to search."""
    monkeypatch.setattr("pipelines.auto_policy.gc", SimpleNamespace(collect=lambda: None))


def search(world: World, **changes: Any) -> Any:
    found = measure(world.pipeline(policy()), "request", policy(**changes), clock=lambda: world.now)
    assert world.live == 0
    return found


def chosen(found: Any) -> dict[str, str]:
    return {name: str(choice.candidate) for name, choice in found.stages.items()}


def test_each_stage_gets_what_it_gains_from() -> None:
    world = World()
    found = search(world)
    assert chosen(found) == {"vae": "fused", "denoising": "full graphs (loop: whole) + fused"}
    assert found.stages["denoising"].reason == "saves 55.0 %, the most"
    measured = found.stages["denoising"].measured
    assert (measured.calls, measured.launches) == (CALLS, 7)
    assert (measured.held_bytes, measured.copied_in) == (3 << 20, 512)
    assert found.policy.auto_seconds is None
    assert not found.policy.for_stage("vae").enable_cuda_graph
    assert found.policy.for_stage("denoising").loop == "whole"
    assert world.most_live == 2


def test_candidates_and_eager_take_turns() -> None:
    world = World()
    search(world)
    kinds = "".join("B" if run.enable_cuda_graph else "A" for run in world.runs)
    assert kinds.startswith("AAABB" + "ABBA" * (CALLS // 2))


def test_a_drift_of_the_clock_changes_no_choice() -> None:
    world = World()
    world.ms = lambda name, own: ideal(name, own) * (1 + world.now / 100)
    assert chosen(search(world)) == chosen(search(World()))


def test_what_loses_everywhere_gets_few_calls_and_no_profile() -> None:
    world = World(ms=lambda name, own: 200.0 if own.graph_mode == "full" and own.enable_cuda_graph else 100.0)
    found = search(world, fused={"swiglu": False})
    assert chosen(found) == {"vae": "off", "denoising": "off"}
    graphs = Counter(run.for_stage("denoising").loop for run in world.runs if run.enable_cuda_graph)
    assert set(graphs.values()) == {2 + CALLS_TO_LOSE}
    assert not any(profiled.enable_cuda_graph for profiled in world.profiled)


def test_without_a_break_or_a_fused_site_nothing_is_measured_twice() -> None:
    found = search(World(fuses=False))
    reasons = Counter(found.not_tried.values())
    assert reasons == {"no site ran fused": 6, "full graphs capture everything": 3}
    broken = World(first_outcome=Outcome(Kind.EAGER, Reason.CAPTURE_FAILED))
    assert search(broken).not_tried == {}


def test_time_is_bounded_and_what_it_left_out_is_said() -> None:
    world = World()
    found = search(world, auto_seconds=8.0)
    assert world.now < 8.5
    assert chosen(found)["denoising"] == "full graphs (loop: whole) + fused"
    assert set(found.not_tried.values()) == {
        "no time left (accel.auto_seconds=8)",
        "full graphs capture everything",
    }


def longer(name: str, own: StagePolicy) -> float:
    """Eager requests of 20 s."""
    return 100 * ideal(name, own)


def test_requests_longer_than_all_time_get_the_best_candidate(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ms=longer)
    with caplog.at_level(logging.WARNING, logger="samebit"):
        found = search(world, auto_seconds=5.0)
    assert chosen(found) == {"vae": "off", "denoising": str(WHOLE)}
    assert "".join("B" if run.enable_cuda_graph else "A" for run in world.runs) == "AAABBABBA"
    assert set(found.not_tried) == set(candidates(world.pipeline(policy()), policy())) - {WHOLE}
    assert found.not_tried[STEP] == "no time left (accel.auto_seconds=5)"
    measured = found.stages["denoising"].measured
    assert (measured.calls, measured.launches) == (LEAST_CALLS, 7)
    assert caplog.messages == [
        f"accel=auto: {WHOLE} took 98 s, which leaves no time for others (accel.auto_seconds=5). "
        "Set it to 646 or more to measure more."
    ]
    assert STEP not in search(World(ms=longer), auto_seconds=646).not_tried


def test_what_can_be_measured_first_is_whatever_failed_before() -> None:
    def fails(policy: AccelPolicy) -> Exception | None:
        return torch.OutOfMemoryError() if policy.for_stage("vae").loop == "whole" else None

    found = search(World(ms=longer, fails=fails), auto_seconds=5.0)
    assert chosen(found)["denoising"] == str(STEP)
    assert found.not_tried[WHOLE] == "out of memory"
    assert found.not_tried[CHAIN] == "no time left (accel.auto_seconds=5)"


def test_what_was_measured_before_time_ran_out_counts() -> None:
    found = search(World(), auto_seconds=2.5)
    measured = found.stages["denoising"].measured
    assert found.stages["denoising"].candidate == WHOLE
    assert (measured.calls, measured.launches) == (5, 7)


@pytest.mark.parametrize(
    ("fast_runs", "why_not", "best"),
    [
        (25, "no time left after 0 of at least 2 calls", WHOLE),
        (28, "no time left after 1 of at least 2 calls", WHOLE),
        (30, None, STEP),
    ],
)
def test_less_than_eager_and_candidate_by_turns_is_no_measurement(
    fast_runs: int, why_not: str | None, best: Candidate
) -> None:
    """The second candidate's, the fastest, are runs 26 and 27, then 28 and 29, then 30 and 31."""
    world = World()
    world.ms = lambda name, own: (
        (0.1 if own.loop == "step" else 1) * (1 if len(world.runs) <= fast_runs else 1000) * ideal(name, own)
    )
    found = search(world, auto_seconds=10.0)
    assert found.stages["denoising"].candidate == best
    assert found.not_tried.get(STEP) == why_not
    assert found.not_tried[CHAIN] == "no time left (accel.auto_seconds=10)"


def test_a_candidate_begins_if_its_shortest_measurement_can_end_in_time() -> None:
    """The first one ends after 4.3 s, and would have taken 1.0 s with two calls."""
    assert STEP in search(World(), auto_seconds=5.2).not_tried
    assert STEP not in search(World(), auto_seconds=5.4).not_tried


def test_a_candidate_without_memory_or_with_other_bits_is_out() -> None:
    def fails(policy: AccelPolicy) -> Exception | None:
        return (
            torch.OutOfMemoryError("CUDA out of memory") if policy.for_stage("vae").loop == "whole" else None
        )

    def digest(policy: AccelPolicy) -> str:
        return "other" if policy.for_stage("vae").loop == "chain" else "same"

    found = search(World(fails=fails, digest=digest))
    assert chosen(found)["denoising"] == "full graphs (loop: step) + fused"
    assert found.not_tried[WHOLE] == "out of memory"
    assert found.not_tried[CHAIN] == "its outputs differ from eager ones"


def test_stages_that_keep_results_are_measured_without_and_idle_ones_are_off() -> None:
    kept = search(World(keeps=frozenset({"vae"})))
    assert kept.stages["vae"].eager_ms == 100
    assert chosen(kept)["vae"] == "fused"
    idle = search(World(idle=frozenset({"vae"})))
    assert idle.stages["vae"].candidate == OFF
    assert idle.stages["vae"].reason == "this request calls none of its regions"


def test_a_stage_that_the_user_set_is_left_alone() -> None:
    found = search(World(), stages={"denoising": StageOverride(graph_mode="segmented")})
    assert list(found.stages) == ["vae"]
    assert found.policy.for_stage("denoising").graph_mode == "segmented"
    assert found.policy.for_stage("denoising").enable_cuda_graph


def test_without_cuda_everything_is_off_and_nothing_runs() -> None:
    world = World()
    found = choose(world.pipeline(policy()), "request", policy())
    assert {choice.reason for choice in found.stages.values()} == {"no_cuda"}
    assert chosen(found) == {"vae": "off", "denoising": "off"}
    assert not found.policy.enable_cuda_graph
    assert world.runs == []


def test_loops_that_a_model_prefers_are_tried_first() -> None:
    tried = candidates(World().pipeline(policy()), policy())
    assert tried[0] == WHOLE
    assert len(tried) == len(set(tried)) == 13
    assert not any(candidate.fused for candidate in candidates(World().pipeline(policy()), policy(fused={})))


# The file


def test_the_file_says_why_and_means_the_chosen_policy() -> None:
    found = search(World(), auto_seconds=30.0, stages={}, memory_budget_mb=1000)
    text = policy_yaml(found, origin="toy on a scripted device")
    assert text.startswith("# Chosen by accel=auto for toy on a scripted device.")
    assert "  # full graphs (loop: whole) + fused: saves 55.0 %, the most\n  denoising:\n" in text
    assert "# Not tried: " in text
    tree = yaml.safe_load(text)
    assert list(tree) == [field.name for field in dataclasses.fields(AccelPolicy)]
    assert msgspec.convert(tree, AccelPolicy) == dataclasses.replace(found.policy, name="chosen")


def test_the_file_of_an_empty_choice_is_complete() -> None:
    found = search(World(), stages={"vae": StageOverride(), "denoising": StageOverride()})
    tree = yaml.safe_load(policy_yaml(found, origin="toy"))
    assert msgspec.convert(tree, AccelPolicy).for_stage("vae") == found.policy.for_stage("vae")


# Real stages


class Toy(Pipeline[str, Any]):
    def __init__(self, policy: AccelPolicy) -> None:
        super().__init__(
            description=DESCRIPTION,
            device=torch.device("cpu"),
            policy=policy,
            stages=(Vae(), Denoising(), Output()),
            remake=Toy,
        )

    def request_from(self, config: Any) -> str:
        raise NotImplementedError

    def files(self, result: Any, *, config_hash: str) -> dict[str, bytes]:
        raise NotImplementedError

    def _begin(self, request: str, progress: Progress) -> State:
        return State(request=request)

    def _finish(self, state: State) -> Any:
        return SimpleNamespace(digests={"sample": str(state["sample"].tolist())}, sample=state["sample"])


def test_recorded_graphs_are_measured_on_real_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RecordingBackend()
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=backend))
    given = Toy(policy(fused={}))
    found = measure(given, "request", policy(fused={}))
    assert list(found.stages) == ["vae", "denoising"]
    assert backend.captures > 0
    assert set(found.not_tried.values()) == {"full graphs capture everything"}
    assert all(choice.measured is not None for choice in found.stages.values())
    assert given.record.stages == {}
    result = given.with_policy(found.policy).run("request")
    assert torch.equal(result.sample, Toy(policy(enable_cuda_graph=False)).run("request").sample)
