"""FLUX 3 Action at its real widths, with few layers: every policy gives the bits of eager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gpu_graph_harness import clean_cuda
from torch import Tensor

from accel.graphs.tree import distinct_tensors
from accel.policy import AccelPolicy
from accel.record import Kind
from accel.site_names import SITE_NAMES
from pipelines.flux3_action.denoising import Denoising
from pipelines.flux3_action.observation import Observation
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.request import ActionRequest, ActionResult
from pipelines.flux3_action.synthetic import droid_config, fill_synthetic, video_encoder_config
from pipelines.flux3_action.text_encoder import CaptionEncoder, tiny_text_config
from pipelines.flux3_action.tokenizer import build_tiny_tokenizer
from pipelines.flux3_action.transformer import ActionTransformer
from pipelines.flux3_action.video_vae import VideoEncoder
from pipelines.flux3_action.weights import Components
from pipelines.pipeline import Placement

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
FUSED = dict.fromkeys(SITE_NAMES, True)
ARMS: dict[str, dict[str, Any]] = {
    "step": {"enable_cuda_graph": True, "loop": "step"},
    "chain": {"enable_cuda_graph": True, "loop": "chain"},
    "whole": {"enable_cuda_graph": True, "loop": "whole"},
    "segmented": {"enable_cuda_graph": True, "graph_mode": "segmented"},
    "fused": {"fused": FUSED},
    "graph+fused": {"enable_cuda_graph": True, "fused": FUSED},
}
# One token a byte and buckets of 80: these take one and two buckets.
PROMPTS = ("lift the red cube", "lift the red cube and put it gently into the blue bowl on the left " * 2)
REQUESTS = 6


@dataclass(frozen=True)
class Reference:
    """What eager made of some requests, and the parts to do it again with."""

    components: Components
    requests: list[ActionRequest]
    results: list[ActionResult]


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    with clean_cuda():
        yield


@pytest.fixture(scope="module")
def base(eager_policy: AccelPolicy) -> Reference:
    return reference("base", eager_policy)


@pytest.fixture(scope="module")
def fp8r(eager_policy: AccelPolicy) -> Reference:
    return reference("fp8r", eager_policy)


def reference(variant: str, eager: AccelPolicy) -> Reference:
    components = components_of(variant)
    pipeline = pipeline_of(components, eager)
    requests = [pipeline.request(observation(index), seed=index) for index in range(REQUESTS)]
    return Reference(components, requests, [pipeline.run(request) for request in requests])


def narrow_depth(variant: str) -> PolicyConfig:
    config = droid_config("full", variant)
    transformer = replace(config.transformer, context_in_dim=128, depth=1, depth_single_blocks=2)
    return replace(config, transformer=transformer, text_output_layers=(1, 2))


def components_of(variant: str) -> Components:
    config, tokenizer = narrow_depth(variant), build_tiny_tokenizer()
    with DEVICE:
        transformer = ActionTransformer(config.transformer, dtype=DTYPE, quantization=config.quantization)
        vae = VideoEncoder(video_encoder_config("full"), dtype=DTYPE)
        text_encoder = CaptionEncoder(
            tiny_text_config(vocabulary=tokenizer.vocabulary),
            output_layers=config.text_output_layers,
            dtype=DTYPE,
        )
    for module in (transformer, vae, text_encoder):
        fill_synthetic(module.checkpoint_slots(), seed=0, prefix=type(module).__name__)
        module.eval().requires_grad_(False)
    return Components(
        config=config,
        transformer=transformer,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        description="synthetic",
    )


def pipeline_of(components: Components, policy: AccelPolicy) -> Flux3ActionPipeline:
    """Every request encodes its prompt anew."""
    return Flux3ActionPipeline(
        components,
        policy=policy,
        placement=Placement(device=DEVICE, dtype=DTYPE, size="full", size_reason="test"),
        outputs_mean_nothing=True,
        caption_cache_tokens=0,
    )


def observation(index: int) -> Observation:
    generator = torch.Generator("cpu").manual_seed(index)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")

    return Observation(
        images={camera: draw(3, 360, 640) for camera in ("wrist", "left", "right")},
        state=draw(8),
        prompt=PROMPTS[index % len(PROMPTS)],
    )


def policy_of(eager: AccelPolicy, arm: str) -> AccelPolicy:
    return replace(eager, name=arm, max_entries=16, strict=True, **ARMS[arm])


def assert_equal_bits(results: list[ActionResult], expected: list[ActionResult]) -> None:
    for index, (result, eager) in enumerate(zip(results, expected, strict=True)):
        assert result.outputs.keys() == eager.outputs.keys()
        for name, value in eager.outputs.items():
            pairs = zip(distinct_tensors(result.outputs[name]), distinct_tensors(value), strict=True)
            assert all(torch.equal(*pair) for pair in pairs), f"request {index}: {name}"
        assert torch.from_numpy(eager.actions).isfinite().all()


def assert_serves_the_bits_of_eager(reference: Reference, policy: AccelPolicy) -> None:
    """All requests first, then all comparisons: a replay must not write over results handed out."""
    pipeline = pipeline_of(reference.components, policy)
    results = [pipeline.run(request) for request in reference.requests]
    assert_equal_bits(results, reference.results)
    assert pipeline.strict_violations() == []
    if policy.enable_cuda_graph:
        pipeline.new_record()
        record = pipeline.record
        again = [pipeline.run(request) for request in reversed(reference.requests)]
        assert_equal_bits(again, reference.results[::-1])
        for stage in ("text_encoding", "vae", "observation_encoding", "denoising"):
            assert {outcome.kind for outcome in record.stage(stage).outcomes} == {Kind.REPLAYED}, stage
    pipeline.close()


@pytest.mark.parametrize("arm", ARMS)
def test_every_output_has_the_bits_of_eager(base: Reference, eager_policy: AccelPolicy, arm: str) -> None:
    assert_serves_the_bits_of_eager(base, policy_of(eager_policy, arm))


def test_fp8_weights(fp8r: Reference, eager_policy: AccelPolicy) -> None:
    assert_serves_the_bits_of_eager(fp8r, policy_of(eager_policy, "graph+fused"))


def test_the_requests_differ(base: Reference) -> None:
    """Else a graph that ignores its inputs would pass."""
    assert len({result.actions.tobytes() for result in base.results}) == REQUESTS
    lengths = {result.outputs["text_encoding.text"].tokens.shape[1] for result in base.results}
    assert lengths == {80, 160}


def test_graphs_go_on_after_weights_changed_in_place(base: Reference, eager_policy: AccelPolicy) -> None:
    request = base.requests[0]
    pipeline = pipeline_of(base.components, policy_of(eager_policy, "whole"))
    pipeline.run(request)
    scale_weights(base.components, 0.5)
    try:
        pipeline.refresh()
        pipeline.new_record()
        record = pipeline.record
        result = pipeline.run(request)
        assert_equal_bits([result], [pipeline_of(base.components, eager_policy).run(request)])
        assert not torch.equal(action_tokens(result), action_tokens(base.results[0]))
        assert {outcome.kind for outcome in record.stage(Denoising.name).outcomes} == {Kind.REPLAYED}
    finally:
        scale_weights(base.components, 2.0)
        pipeline.refresh()
    assert_equal_bits([pipeline.run(request)], base.results[:1])


def scale_weights(components: Components, factor: float) -> None:
    """In place; by a power of two, so that it can be undone."""
    for module in (components.transformer, components.vae):
        for slot in module.checkpoint_slots().values():
            if slot.is_floating_point():
                slot.mul_(factor)


def action_tokens(result: ActionResult) -> Tensor:
    tokens: Tensor = result.outputs["denoising.action_tokens"]
    return tokens
