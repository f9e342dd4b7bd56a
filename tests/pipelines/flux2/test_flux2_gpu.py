"""FLUX.2 on CUDA: eager has diffusers' bits, and every policy has eager's, at real widths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_flux2 import both, make_pair

import pipelines.flux2.weights
from accel.policy import AccelPolicy
from accel.record import Kind
from pipelines.build import build
from pipelines.flux2.config import flux2_config
from pipelines.pipeline import Pipeline
from tasks.config import compose

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SETTINGS = ("model=flux2_klein", "model.variant=4b-base", "size=full", "device=cuda")
POLICIES = {
    "graph": ("accel=graph",),
    "step": ("accel=graph", "accel.loop=step"),
    "segmented": ("accel=segmented",),
    "fused": ("accel=fused",),
    "graph+fused": ("accel=graph+fused",),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["4b", "4b-base", "dev"])
def test_eager_equals_diffusers(variant: str, dtype: torch.dtype, eager_policy: AccelPolicy) -> None:
    pair = make_pair(variant, dtype, eager_policy, DEVICE)
    for pictures in ((), (Image.radial_gradient("L").convert("RGB"),)):
        result, latents, pixels = both(pair, pictures=pictures, guidance=3.0)
        assert torch.equal(result.outputs["denoising.latents"], latents)
        assert torch.equal(result.images, pixels.cpu())


@pytest.fixture(scope="module")
def eager() -> Iterator[Pipeline[Any, Any]]:
    """The widths of klein 4B and its VAE, one double and two single blocks, a tiny text encoder."""
    full, tiny = flux2_config("4b-base", "full"), flux2_config("4b-base", "tiny")
    shallow = replace(
        tiny,
        transformer={
            **full.transformer,
            "num_layers": 1,
            "num_single_layers": 2,
            "joint_attention_dim": tiny.transformer["joint_attention_dim"],
        },
        vae=full.vae,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines.flux2.weights, "flux2_config", lambda variant, size: shallow)
        yield build(compose("accel=eager", *SETTINGS))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_equals_eager(eager: Pipeline[Any, Any], policy: str) -> None:
    """Fifty steps with guidance, the base variant's own; shapes and prompts alternate."""
    chosen = compose(*POLICIES[policy], *SETTINGS)
    pipeline = eager.with_policy(chosen.accel)
    request = pipeline.request_from(chosen)
    assert (request.steps, request.guidance) == (50, 4.0)
    requests = [
        replace(request, seed=1, prompt="a cat", height=512, width=512),
        replace(request, seed=2, prompt="a dog", height=256, width=384),
        replace(request, seed=3, prompt="a cat and a dog", height=512, width=512),
    ]
    for served in requests:
        assert pipeline.run(served).digests == eager.run(served).digests
    assert pipeline.strict_violations() == []
    if chosen.accel.enable_cuda_graph:
        kinds = {outcome.kind for stage in pipeline.record.stages.values() for outcome in stage.outcomes}
        assert kinds == {Kind.CAPTURED, Kind.REPLAYED}
    if chosen.accel.fused["swiglu_concat"]:
        fused = {site.site for stage in pipeline.record.stages.values() for site in stage.sites if site.fused}
        assert fused >= {"joint_qk_norm_rope", "swiglu_concat", "guided_euler_step", "group_norm_silu"}
        mounts = [mount for stage in pipeline.record.stages.values() for mount in stage.mounts]
        assert mounts
        assert all(mount.mounted for mount in mounts)
    pipeline.close()
