"""Loops as real CUDA graphs: the bits of the plain loop, and how often the host speaks to the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from gpu_graph_harness import allocator_noise, clean_cuda
from solver_stage import Carry, Solver, Step, same, steps_that_remember, unbound
from torch import Tensor

from accel.measure.profile import profile_call
from accel.policy import AccelPolicy
from accel.record import Kind
from accel.region import LoopMode, loop_body
from accel.runner import Runner
from pipelines.flux3_action.denoising import Denoising
from pipelines.flux3_action.observation import Observation
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.request import ActionRequest
from pipelines.flux3_action.stages import TextTokens
from pipelines.flux3_action.synthetic import droid_config, fill_synthetic
from pipelines.flux3_action.tables import StaticTables
from pipelines.flux3_action.transformer import ActionTransformer
from pipelines.progress import NULL_PROGRESS
from stages.stage import State

pytestmark = pytest.mark.gpu

MODES: tuple[LoopMode, ...] = get_args(LoopMode)
WIDTH = 256


@pytest.fixture(autouse=True)
def no_grad_on_cuda() -> Iterator[None]:
    with clean_cuda():
        yield


def runner_for(stage: Any, loop: str, *, graph_mode: Any = "full", max_entries: int = 16) -> Runner:
    settings: dict[str, Any] = dict(max_segments=64, strict=True, fused={}, stages={}, loop=loop)
    policy = AccelPolicy(
        name="test", enable_cuda_graph=True, graph_mode=graph_mode, max_entries=max_entries,
        on_full="evict", **settings,
    )  # fmt: skip
    runner = Runner(policy, device=torch.device("cuda"))
    runner.bind(stage)
    return runner


def host_launches(fn: Callable[[], Any]) -> int:
    """Kernels, copies, fills and graphs that the host launched."""
    activity = profile_call(fn, device=torch.device("cuda"))
    assert activity is not None
    return activity.host_launches


def solver_request(n: int) -> tuple[Tensor, tuple[Step, ...], Tensor]:
    return (
        torch.randn(64, WIDTH),
        steps_that_remember([torch.rand(()) for _ in range(n)]),
        torch.randn(64, WIDTH),
    )


@pytest.mark.parametrize("max_entries", [2, 16])
@pytest.mark.parametrize("mode", MODES)
def test_requests_of_any_length_get_the_plain_bits(mode: str, max_entries: int) -> None:
    """With too few entries graphs are evicted while their results are still on the way to the next step."""
    stage = Solver(WIDTH)
    plain = unbound(stage)
    runner = runner_for(stage, mode, max_entries=max_entries)
    requests = [solver_request(n) for n in (5, 1, 9, 2, 5, 3, 9, 4, 5)]
    results = []
    for request in requests:
        allocator_noise()
        results.append(stage.run(*request))
    for result, request in zip(results, requests, strict=True):
        assert same(result, plain.run(*request))
    if max_entries == 16:
        assert runner.strict_violations() == []


@pytest.mark.parametrize("mode", MODES)
def test_requests_from_two_streams_do_not_mix(mode: str) -> None:
    stage = Solver(WIDTH)
    plain = unbound(stage)
    runner_for(stage, mode)
    requests = [solver_request(6) for _ in range(12)]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    results = []
    for i, request in enumerate(requests):
        with torch.cuda.stream(streams[i % 2]):
            results.append(stage.run(*request))
    torch.cuda.synchronize()
    assert all(same(a, plain.run(*request)) for a, request in zip(results, requests, strict=True))


class Curious(Solver):
    """Its step asks the GPU something."""

    @loop_body("chain")
    def advance(self, carry: Carry, step: Step, shared: Tensor, *, gain: float) -> Carry:
        if (step.scale < 2).item():
            return super().advance(carry, step, shared, gain=gain)
        return carry


@pytest.mark.parametrize("mode", MODES)
def test_segmented_graphs_serve_loops_too(mode: str) -> None:
    stage = Curious(WIDTH)
    plain = unbound(stage)
    runner = runner_for(stage, mode, graph_mode="segmented")
    for n in (5, 7, 5, 7):
        request = solver_request(n)
        assert same(stage.run(*request), plain.run(*request))
    assert runner.strict_violations() == []
    assert runner.record.stage("denoising").breaks


def narrow_config() -> PolicyConfig:
    """DROID's sequence through two joint blocks with two heads of the real size."""
    tiny = droid_config("tiny")
    transformer = replace(
        tiny.transformer, hidden_size=256, num_heads=2, depth=1, depth_single_blocks=2, axes_dim=(32,) * 4
    )
    return replace(tiny, transformer=transformer)


@cache
def narrow_transformer() -> ActionTransformer:
    module = ActionTransformer(narrow_config().transformer, dtype=torch.bfloat16)
    fill_synthetic(module.checkpoint_slots(), seed=0, prefix="dit.")
    return module.eval().requires_grad_(False)


def denoising() -> Denoising:
    config, transformer, device = narrow_config(), narrow_transformer(), torch.device("cuda")
    tables = StaticTables(config, transformer, device=device)
    return Denoising(
        config=config, transformer=transformer, tables=tables, device=device, dtype=torch.bfloat16
    )


def state_of(stage: Denoising, *, seed: int, length: int = 80, **settings: Any) -> State:
    options: dict[str, Any] = dict(
        steps=4, sampler="cosmos_unipc", shift=5.0, guidance_video=4.0, guidance_action=1.0, horizon=1
    )
    observation = Observation(images={}, state=torch.zeros(8, device="cpu"), prompt="")
    request = ActionRequest(observation=observation, seed=seed, **options | settings)
    generator = torch.Generator("cuda").manual_seed(seed)

    def tokens(n: int) -> Tensor:
        return torch.randn(1, n, 256, generator=generator).bfloat16()

    def text() -> TextTokens:
        return TextTokens(tokens(length), stage._tables.text_rope(length))

    return State(
        request=request,
        progress=NULL_PROGRESS,
        text=text(),
        null_text=text() if request.guided else None,
        video_cond=tokens(stage._tables.rope("video_cond").shape[1]),
        state_cond=tokens(1),
    )


@pytest.mark.parametrize("mode", MODES)
@torch.inference_mode()
def test_flux3_denoising_keeps_its_bits(mode: str) -> None:
    stage, plain = denoising(), denoising()
    runner = runner_for(stage, mode)
    requests: list[dict[str, Any]] = [
        {"seed": 0},
        {"seed": 1, "guidance_video": 1.0, "length": 160},
        {"seed": 2, "steps": 8},
        {"seed": 3, "sampler": "euler"},
        {"seed": 4, "shift": 3.0},
        {"seed": 5, "steps": 8},
        {"seed": 6},
    ]
    served = [state_of(stage, **request) for request in requests]
    for state in served:
        allocator_noise()
        stage.run(state)
    for state, request in zip(served, requests, strict=True):
        expected = state_of(plain, **request)
        plain.run(expected)
        assert torch.equal(state["video_tokens"], expected["video_tokens"])
        assert torch.equal(state["action_tokens"], expected["action_tokens"])
    assert runner.strict_violations() == []


@torch.inference_mode()
def test_a_whole_loop_is_one_launch_and_its_copies(capsys: pytest.CaptureFixture[str]) -> None:
    counts: dict[str, int] = {}
    for mode in MODES:
        stage = denoising()
        runner = runner_for(stage, mode)
        stage.run(state_of(stage, seed=0))
        runner.new_record()
        record = runner.record.stage("denoising")
        state = state_of(stage, seed=1)
        counts[mode] = host_launches(lambda stage=stage, state=state: stage.run(state))  # type: ignore[misc]
        assert {outcome.kind for outcome in record.outcomes} == {Kind.REPLAYED}
    stage = denoising()
    stage.run(state_of(stage, seed=0))
    state = state_of(stage, seed=1)
    counts["eager"] = host_launches(lambda: stage.run(state))
    with capsys.disabled():
        print(f"\nlaunches by the host for four steps: {counts}")
    assert counts["whole"] <= 16  # the noise, the inputs by dtype, the graph, two results
    assert counts["whole"] < counts["chain"] <= counts["step"] < counts["eager"]
