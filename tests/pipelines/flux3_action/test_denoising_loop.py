"""The denoising loop under every way to capture it, against the plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import accel.fusion.gate
from accel.fusion.compare import first_mismatch
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy, Loop
from accel.record import Kind
from accel.region import LoopMode
from accel.runner import Runner
from pipelines.flux3_action.denoising import Denoising
from pipelines.flux3_action.observation import Observation
from pipelines.flux3_action.package import read_package
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.request import ActionRequest
from pipelines.flux3_action.stages import TextTokens
from pipelines.flux3_action.synthetic import fill_synthetic
from pipelines.flux3_action.tables import StaticTables
from pipelines.flux3_action.transformer import ActionTransformer
from stages.stage import State

CPU = torch.device("cpu")
MODES: tuple[LoopMode, ...] = get_args(LoopMode)
DTYPE = torch.bfloat16
CONFIG = read_package(Path(__file__).parents[2] / "golden" / "flux3" / "package").config


@pytest.fixture(scope="module")
def transformer() -> ActionTransformer:
    module = ActionTransformer(CONFIG.transformer, dtype=DTYPE)
    fill_synthetic(module.checkpoint_slots(), seed=0, prefix="dit.")
    return module.eval().requires_grad_(False)


def denoising(transformer: ActionTransformer, config: PolicyConfig = CONFIG) -> Denoising:
    tables = StaticTables(config, transformer, device=CPU)
    return Denoising(config=config, transformer=transformer, tables=tables, device=CPU, dtype=DTYPE)


def test_noise_is_the_same_on_any_number_of_threads(transformer: ActionTransformer) -> None:
    config = replace(CONFIG, camera_layout="droid", chunk_size=32)  # large enough to be shared out
    stage = denoising(transformer, config)
    before, drawn = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            drawn.append(stage.noise(3))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one, other)


class CountingProgress:
    def __init__(self) -> None:
        self.advanced = 0

    def start(self, phase: str, total: int) -> None: ...

    def advance(self, phase: str, amount: int = 1) -> None:
        self.advanced += amount

    def finish(self, phase: str) -> None: ...


def state_of(
    stage: Denoising, *, seed: int, length: int = 80, progress: Any = None, **settings: Any
) -> State:
    """What the stages before would have left: random tokens."""
    options: dict[str, Any] = dict(
        steps=4, sampler="cosmos_unipc", shift=5.0, guidance_video=4.0, guidance_action=1.0, horizon=1
    )
    request = ActionRequest(
        observation=Observation(images={}, state=torch.zeros(CONFIG.action_dim), prompt=""),
        seed=seed,
        **options | settings,
    )
    generator = torch.Generator().manual_seed(1000 + seed)
    tables = stage.modules()["tables"]
    assert isinstance(tables, StaticTables)

    def tokens(n: int) -> Tensor:
        return torch.randn(1, n, CONFIG.transformer.hidden_size, generator=generator).to(DTYPE)

    def text() -> TextTokens:
        return TextTokens(tokens(length), tables.text_rope(length))

    return State(
        request=request,
        progress=progress or CountingProgress(),
        text=text(),
        null_text=text() if request.guided else None,
        video_cond=tokens(tables.rope("video_cond").shape[1]),
        state_cond=tokens(1),
    )


REQUESTS: tuple[dict[str, Any], ...] = (
    {"seed": 0},
    {"seed": 1},
    {"seed": 2, "steps": 1},
    {"seed": 3, "steps": 6, "shift": 3.0},
    {"seed": 4, "guidance_video": 1.0, "length": 160},
    {"seed": 5, "sampler": "euler", "steps": 3},
    {"seed": 6, "steps": 2},
    {"seed": 7},
    {"seed": 3, "steps": 6, "shift": 5.0},
)


def runner_of(stage: Denoising, policy: AccelPolicy) -> Runner:
    runner = Runner(policy, device=CPU, backend=RecordingBackend())
    runner.bind(stage)
    return runner


@pytest.fixture
def policy(eager_policy: AccelPolicy) -> AccelPolicy:
    return replace(eager_policy, enable_cuda_graph=True, max_entries=32, strict=True)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_requests_in_any_order_get_the_bits_of_the_plain_loop(
    transformer: ActionTransformer, policy: AccelPolicy, mode: LoopMode
) -> None:
    plain, stage = denoising(transformer), denoising(transformer)
    runner = runner_of(stage, replace(policy, loop=mode))
    served = []
    for request in REQUESTS:
        state = state_of(stage, **request)
        stage.run(state)
        served.append(state)
    for state, request in zip(served, REQUESTS, strict=True):
        expected = state_of(plain, **request)
        plain.run(expected)
        for name in ("video_tokens", "action_tokens"):
            assert first_mismatch(expected[name], state[name], what=name) is None
    assert runner.strict_violations() == []


@pytest.mark.parametrize(("mode", "calls"), [("step", 4), ("chain", 4), ("whole", 1), ("auto", 1)])
@torch.no_grad()
def test_a_warm_request_is_replays_alone(
    transformer: ActionTransformer, policy: AccelPolicy, mode: Loop, calls: int
) -> None:
    """With the released four steps, which by default are one graph; a new seed is one more."""
    stage = denoising(transformer)
    runner = runner_of(stage, replace(policy, loop=mode))
    stage.run(state_of(stage, seed=0))
    for new_seed in (1, 0):
        runner.new_record()
        record, progress = runner.record, CountingProgress()
        stage.run(state_of(stage, seed=1, progress=progress))
        outcomes = record.stage("denoising").outcomes
        assert {outcome.kind: n for outcome, n in outcomes.items()} == {Kind.REPLAYED: calls + new_seed}
        assert progress.advanced == 4


@torch.no_grad()
def test_what_a_seed_decides_is_computed_once(
    transformer: ActionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, embedded = denoising(transformer), []
    embed = transformer.embed_stream

    def counting(stream: str, *args: Any) -> Tensor:
        embedded.append(stream)
        return embed(stream, *args)

    monkeypatch.setattr(transformer, "embed_stream", counting)

    def results(times: int, **request: Any) -> list[Tensor]:
        """Those of the stage, equal to those of one that keeps nothing. times: that the first step embeds."""
        embedded.clear()
        state = state_of(stage, **request)
        stage.run(state)
        assert embedded == ["video", CONFIG.action_stream] * (times + request["steps"] - 1)
        expected = state_of(stage, **request)
        denoising(transformer).run(expected)
        for name in ("video_tokens", "action_tokens"):
            assert torch.equal(state[name], expected[name])
        return [state["video_tokens"], state["action_tokens"]]

    one = dict(seed=0, steps=1)
    first = results(1, **one)
    for tensor in first:
        tensor.zero_()  # results are the caller's
    results(0, **one)
    results(0, **one, length=160, guidance_video=1.0)
    results(1, seed=0, steps=2)
    results(1, seed=0, steps=2, shift=3.0)
    results(1, seed=0, steps=1, sampler="euler")
    for seed in range(1, 1 + stage.max_starts):
        results(1, seed=seed, steps=1)
    results(1, **one)  # kept no more
    stage.forget()
    results(1, **one)


@torch.no_grad()
def test_what_a_kernel_made_that_was_switched_off_since_is_computed_anew(
    transformer: ActionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, state = denoising(transformer), state_of(denoising(transformer), seed=0)
    start = stage.start(state["request"])
    assert stage.start(state["request"]) is start
    monkeypatch.setattr(accel.fusion.gate, "_epoch", SimpleNamespace(value=1 << 20))
    assert stage.start(state["request"]) is not start


@torch.no_grad()
def test_another_shift_needs_no_other_graph(transformer: ActionTransformer, policy: AccelPolicy) -> None:
    """Times and noise levels are inputs of the graph."""
    stage = denoising(transformer)
    runner = runner_of(stage, replace(policy, loop="whole"))
    for shift in (5.0, 3.0, 2.0):
        stage.run(state_of(stage, seed=0, shift=shift))
    assert runner.record.stage("denoising").entries == 2  # the start's and the loop's
