"""Compiled stages: right values, a named reason for whatever ran eager, and nothing left for others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from accel import compiled
from accel.compiled import repeated_blocks
from accel.errors import ConfigError
from accel.graphs.recording import RecordingBackend
from accel.loops import iterate
from accel.policy import AccelPolicy, CompileScope, StageOverride
from accel.record import Kind, Outcome, Reason
from accel.region import loop_body, region
from accel.runner import Runner

CPU = torch.device("cpu")
COMPILED = Outcome(Kind.COMPILED)


@dataclass(frozen=True)
class Carry:
    x: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + torch.tanh(self.linear(x)) * scale


class Toy:
    """A stage of stacked blocks with two regions and a loop; `head` calls none of the blocks."""

    name = "denoising"

    def __init__(self, net: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.net = net or nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(3))})
        self.net.requires_grad_(False).eval()

    def modules(self) -> Mapping[str, nn.Module]:
        return {"net": self.net}

    def mounts(self, allowed: frozenset[str]) -> tuple[()]:
        return ()

    @region
    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for block in self.net["blocks"]:
            x = block(x, scale=scale)
        return x

    @region
    def head(self, x: Tensor) -> Tensor:
        return x * 3 + 1

    @loop_body("whole")
    def advance(self, carry: Carry, step: Tensor, shared: Tensor) -> Carry:
        return Carry(self.net["blocks"][0](carry.x) * step + shared)


def policy(scope: CompileScope = "whole", **changes: Any) -> AccelPolicy:
    settings: dict[str, Any] = dict(
        name="compile", enable_cuda_graph=False, graph_mode="full", max_entries=4, max_segments=8,
        on_full="eager", compile="default", compile_scope=scope, strict=False, fused={}, stages={},
    )  # fmt: skip
    return AccelPolicy(**settings | changes)


def bound(scope: CompileScope, stage: Toy | None = None, **changes: Any) -> tuple[Toy, Runner]:
    stage, runner = stage or Toy(), Runner(policy(scope, **changes), device=CPU)
    runner.bind(stage)
    return stage, runner


@pytest.fixture(autouse=True)
def mode() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture
def without_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are traced and guarded as always, then run by the kernels of eager: the same bits, at once."""
    monkeypatch.setattr(compiled, "_BACKEND", "eager")


X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.parametrize("scope", ["whole", "regional"])
def test_generated_code_serves_regions_and_loops(scope: CompileScope) -> None:
    stage, runner = bound(scope)
    expected = Toy()
    for _ in range(2):
        torch.testing.assert_close(stage.encode(X), expected.encode(X))
        carry = iterate(stage.advance, Carry(X), torch.ones(3).unbind(), X)
        torch.testing.assert_close(carry.x, iterate(expected.advance, Carry(X), torch.ones(3).unbind(), X).x)
    record = runner.record.stage("denoising")
    assert record.outcomes == {COMPILED: 2 + 6}
    assert record.tier == "compiled"
    assert record.compile_ms > 0
    assert record.to_dict()["tier"] == "compiled"
    runner.new_record()
    stage.encode(X)
    again = runner.record.stage("denoising")
    assert (again.tier, again.compile_ms) == (record.tier, record.compile_ms)


@pytest.mark.usefixtures("without_code_generation")
class TestTraced:
    def test_a_region_without_repeated_blocks_says_so(self) -> None:
        stage, runner = bound("regional")
        assert torch.equal(stage.head(X), X * 3 + 1)
        record = runner.record.stage("denoising")
        assert record.outcomes == {Outcome(Kind.EAGER, Reason.NOTHING_TO_COMPILE): 1}
        assert record.tier == "exact"
        assert runner.strict_violations() == ["denoising: eager (nothing_to_compile)"]

    def test_whole_compiles_regions_without_blocks(self) -> None:
        stage, runner = bound("whole")
        assert torch.equal(stage.head(X), X * 3 + 1)
        assert runner.record.stage("denoising").outcomes == {COMPILED: 1}

    def test_blocks_share_code_and_keep_their_weights(self) -> None:
        stage, _ = bound("regional")
        before = compiled._graphs_made()
        assert torch.equal(stage.encode(X), Toy().encode(X))
        assert compiled._graphs_made() - before < 3

    def test_more_kinds_of_calls_than_the_limit_run_eager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled, "RECOMPILE_LIMIT", 2)
        stage, runner = bound("whole")
        for n in (2, 3, 4, 2):
            x = torch.ones(n, 4)
            assert torch.equal(stage.head(x), x * 3 + 1)
        outcomes = runner.record.stage("denoising").outcomes
        (missed,) = (outcome for outcome in outcomes if outcome.kind is Kind.EAGER)
        assert missed.reason is Reason.RECOMPILE_LIMIT
        assert (outcomes[COMPILED], outcomes[missed]) == (3, 1)

    def test_what_a_region_raises_reaches_the_caller_and_is_no_failure_of_the_compiler(self) -> None:
        stage, runner = bound("whole")
        with pytest.raises(RuntimeError, match="mat1"):
            stage.encode(torch.ones(3, 5))
        assert torch.equal(stage.encode(X), Toy().encode(X))
        assert runner.record.stage("denoising").outcomes == {COMPILED: 1}

    def test_closing_drops_what_is_ours_alone(self) -> None:
        other = torch.compile(lambda x: x + 1, backend="eager")
        stage, runner = bound("whole")
        other(X), stage.head(X)
        runner.close()
        before = compiled._graphs_made()
        other(X)
        assert compiled._graphs_made() == before
        assert torch.equal(stage.head(X), X * 3 + 1)
        assert compiled._graphs_made() == before + 1

    def test_a_pipeline_that_shares_the_model_stays_eager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        traced: list[bool] = []
        forward = Block.forward

        def observed(self: Block, x: Tensor, *, scale: float = 1.0) -> Tensor:
            traced.append(torch.compiler.is_compiling())
            return forward(self, x, scale=scale)

        monkeypatch.setattr(Block, "forward", observed)
        stage, _ = bound("regional")
        eager = Toy(stage.net)
        stage.encode(X)
        assert not any("forward" in vars(block) for block in stage.net["blocks"])
        traced.clear()
        eager.encode(X)
        assert traced == [False] * 3

    def test_a_hook_around_a_block_runs(self) -> None:
        """Hooks of libraries replace `forward` on the instance, to move, cast or reuse results."""
        stage, runner = bound("regional")
        first = stage.net["blocks"][0]
        first.forward = hook = lambda x, *, scale: x * 2
        expected = Toy(stage.net).encode(X)
        assert torch.equal(stage.encode(X), expected)
        assert vars(first)["forward"] is hook
        assert runner.record.stage("denoising").outcomes == {COMPILED: 1}

    def test_another_thread_sees_stock_blocks_while_a_region_runs(self) -> None:
        class Waiting(Toy):
            @region
            def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
                with ThreadPoolExecutor(1) as pool:
                    return pool.submit(torch.no_grad()(self.net["blocks"][0]), x).result()

        stage, runner = bound("regional", Waiting())
        assert torch.equal(stage.encode(X), stage.net["blocks"][0](X))
        assert runner.record.stage("denoising").outcomes == {
            Outcome(Kind.EAGER, Reason.NOTHING_TO_COMPILE): 1
        }

    def test_other_stages_keep_their_own_policy(self) -> None:
        graphs = StageOverride(enable_cuda_graph=True)
        compiling = StageOverride(compile="default", compile_scope="whole")
        runner = Runner(
            policy(compile=None, compile_scope=None, stages={"a": graphs, "b": compiling}),
            device=CPU,
            backend=RecordingBackend(),
        )
        for name in "abc":
            stage = Toy()
            stage.name = name  # type: ignore[misc]
            runner.bind(stage)
            assert torch.equal(stage.head(X), X * 3 + 1)
        kinds = {name: next(iter(runner.record.stage(name).outcomes)) for name in "abc"}
        assert kinds == {
            "a": Outcome(Kind.CAPTURED), "b": COMPILED, "c": Outcome(Kind.EAGER, Reason.DISABLED)
        }  # fmt: skip
        assert [runner.record.stage(name).tier for name in "abc"] == ["exact", "compiled", "exact"]


def broken(graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
    raise RuntimeError("no C++ compiler found\nlong explanation")


@pytest.mark.parametrize("scope", ["whole", "regional"])
def test_a_compiler_that_fails_is_named_and_asked_once(
    scope: CompileScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_BACKEND", broken)
    stage, runner = bound(scope)
    for _ in range(2):
        assert torch.equal(stage.encode(X), Toy().encode(X))
    record = runner.record.stage("denoising")
    ((outcome, calls),) = record.outcomes.items()
    assert (outcome.reason, calls) == (Reason.COMPILE_FAILED, 2)
    assert "no C++ compiler found" in outcome.detail
    assert record.tier == "exact"
    assert record.compile_ms > 0
    assert not any("forward" in vars(block) for block in stage.net["blocks"])


def test_repeated_blocks_are_the_outer_layers_of_a_stack() -> None:
    stacked = [nn.ModuleDict({"inner": nn.ModuleList(Block() for _ in range(2))}) for _ in range(2)]
    parts = {
        "stack": nn.ModuleList(stacked),
        "nested": nn.Sequential(nn.Sequential(blocks := Block()), more := Block()),
        "single": nn.ModuleList([nn.TransformerEncoderLayer(4, 1)]),
        "leaves": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
        "alone": Block(),
    }
    model = nn.ModuleDict(parts)
    assert repeated_blocks([model, model]) == [*stacked, blocks, more]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_cuda_graph": True}, "accel: compile=default and enable_cuda_graph=true exclude each other"),
        ({"fused": {"swiglu": True}}, r"accel: compile=default and fused kernels \(swiglu\) exclude"),
        ({"compile": None}, "accel.compile_scope=whole has no effect without accel.compile"),
        ({"compile_scope": None}, "accel.compile=default needs compile_scope=regional or whole"),
        ({"auto_seconds": 1.0}, "accel.auto_seconds: stages are not chosen for beside compiled ones"),
        (
            {"stages": {"vae": StageOverride(enable_cuda_graph=True)}},
            "accel.stages.vae: compile=default and enable_cuda_graph=true",
        ),
    ],
)
def test_what_excludes_or_lacks_each_other_is_refused(changes: dict[str, Any], message: str) -> None:
    policy().check(stages=["vae", "denoising"], sites=["swiglu"])
    with pytest.raises(ConfigError, match=message):
        policy(**changes).check(stages=["vae", "denoising"], sites=["swiglu"])


def test_the_tier_of_a_policy_covers_its_stages() -> None:
    off: dict[str, Any] = {"compile": None, "compile_scope": None}
    assert policy(**off).tier == "exact"
    assert policy().tier == "compiled"
    assert policy(**off, stages={"vae": StageOverride(compile="default")}).tier == "compiled"
