"""accel=auto on scripted times, and on real stages with recorded graphs."""

from __future__ import annotations

import dataclasses
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
from accel.policy import AccelPolicy, StageOverride
from accel.record import Kind, Outcome, Reason
from accel.runner import Runner
from accel.selection import OFF, Candidate
from pipelines.auto_policy import CALLS, CALLS_TO_LOSE, candidates, choose, measure
from pipelines.pipeline import Pipeline
from pipelines.policy_file import policy_yaml
from pipelines.progress import Progress
from stages.stage import State

WHOLE = Candidate(graphs="full", loop="whole", fused=True)


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


def test_what_loses_everywhere_gets_few_calls() -> None:
    world = World(ms=lambda name, own: 200.0 if own.graph_mode == "full" and own.enable_cuda_graph else 100.0)
    found = search(world, fused={"swiglu": False})
    assert chosen(found) == {"vae": "off", "denoising": "off"}
    graphs = Counter(run.for_stage("denoising").loop for run in world.runs if run.enable_cuda_graph)
    assert set(graphs.values()) == {2 + CALLS_TO_LOSE}


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
    short = search(World(), auto_seconds=1.0)
    assert chosen(short) == {"vae": "off", "denoising": "off"}
    assert {choice.reason for choice in short.stages.values()} == {"nothing else was measured"}


def test_time_that_runs_out_within_a_candidate_leaves_it_unmeasured() -> None:
    world = World()
    world.ms = lambda name, own: ideal(name, own) * (100 if own.enable_cuda_graph and world.now > 3 else 1)
    found = search(world, auto_seconds=10.0)
    assert found.not_tried[WHOLE].startswith("no time left after ")
    assert chosen(found)["denoising"] == "off"


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
    assert found.not_tried[dataclasses.replace(WHOLE, loop="chain")] == "its outputs differ from eager ones"


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
