"""The whole pipeline against reference chunks made by an independent implementation."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from golden_pipeline import CONFIG, GOLDEN, make_pipeline
from torch import Tensor

from accel.policy import AccelPolicy
from pipelines.flux3_action.action_space import state_token
from pipelines.flux3_action.denoising import Denoising
from pipelines.flux3_action.observation import Observation
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.policy_config_parsing import parse_policy_config
from pipelines.flux3_action.settings import Flux3Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Velocities:
    """Keeps what every call of `velocity` returned."""

    def __init__(self, stage: Denoising) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        self._velocity = stage.velocity
        stage.velocity = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen.append(self._velocity(*args, **kwargs))
        return self.seen[-1]


@pytest.mark.parametrize("name", ["main", "one_step_no_cfg"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_chunk_matches_the_reference(
    golden: Any, golden_case: Any, eager_policy: AccelPolicy, name: str, precision: str
) -> None:
    case = golden_case(f"e2e_{precision}_{name}")
    tensors = golden("e2e.safetensors")
    settings = case["config"]
    pipeline = make_pipeline(
        dtype=DTYPES[precision],
        contexts={"lift": tensors["ctx"], "": tensors["ctx_uncond"]},
        policy=eager_policy,
    )
    denoising = denoising_of(pipeline)
    velocities = Velocities(denoising)
    image = tensors["image.cam"].permute(2, 0, 1).float() / 255
    state = tensors["state"].float()
    request = pipeline.request(
        Observation(images={"cam": image}, state=state, prompt="lift"),
        seed=settings["seed"],
        settings=Flux3Settings(
            steps=settings["num_inference_steps"],
            guidance=settings["guidance"]["video"],
            guidance_action=settings["guidance"]["action"],
            shift=settings["sampler_shift"],
        ),
    )

    result = pipeline.run(request)

    video_noise, action_noise = denoising.noise(settings["seed"])
    rows, columns = CONFIG.latent_hw
    latent = result.outputs["vae.latent_tokens"].transpose(1, 2).unflatten(2, (1, rows, columns))
    got = {
        "actions": torch.from_numpy(result.actions),
        "final_action": result.outputs["denoising.action_tokens"],
        "final_video": result.outputs["denoising.video_tokens"],
        "vel_video": torch.stack([video for video, _ in velocities.seen]),
        "vel_action": torch.stack([action for _, action in velocities.seen]),
        "cond_latent": latent,
        "state_token": state_token(state, CONFIG),
        "canvas_mean_8x8": result.outputs["vae.canvas"]
        .unflatten(2, (-1, 8))
        .unflatten(1, (-1, 8))
        .mean((2, 4)),
        "noise_video": video_noise,
        "noise_action": action_noise,
    }
    check(got, case, tensors)


def test_droid_geometry_matches_the_reference(
    golden: Any, golden_case: Any, eager_policy: AccelPolicy
) -> None:
    """2,720 + 340 + 32 + 1 + text tokens, from a latent given by formula."""
    case = golden_case("e2e_fp32_droid_geometry")
    tensors = golden("e2e.safetensors")
    native = json.loads((GOLDEN / "package" / "config.native.json").read_text())
    config = parse_policy_config(native | case["config"]["override_policy"])
    pipeline = make_pipeline(
        config=config,
        contexts={"lift": tensors["ctx"], "": tensors["ctx_uncond"]},
        policy=eager_policy,
    )
    y = torch.arange(17, dtype=torch.float64)[:, None]
    x = torch.arange(23, dtype=torch.float64)[None, :]
    c = torch.arange(96, dtype=torch.float64)[:, None, None]
    latent = torch.sin(0.37 * c + 0.61 * y + 0.23 * x + 0.01 * y * x).float()[None, :, None]
    vae: Any = pipeline.stages[1].modules()["vae"]
    vae.encode = lambda pixels: latent
    images = {camera: torch.zeros(3, 360, 640) for camera in config.cameras}
    denoising = denoising_of(pipeline)
    velocities = Velocities(denoising)

    result = pipeline.run(
        pipeline.request(Observation(images=images, state=tensors["state"].float(), prompt="lift"))
    )

    video_noise, action_noise = denoising.noise(case["config"]["seed"])
    got = {
        "actions": torch.from_numpy(result.actions),
        "final_action": result.outputs["denoising.action_tokens"],
        "vel_action": torch.stack([action for _, action in velocities.seen]),
        "final_video_first_6_tokens": result.outputs["denoising.video_tokens"][:, :6],
        "action_noise": action_noise,
        "video_noise_first_6_tokens": video_noise[:, :6],
    }
    check(got, case, tensors)


def check(got: dict[str, Tensor], case: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Everything that the case recorded; noise to the bit."""
    for role, name in case["outputs"].items():
        want = tensors[name].float()
        actual = got[role].float().reshape(want.shape)
        if "noise" in role:
            assert torch.equal(actual, want), role
        elif "rel_l2" in case["tol"]:
            distance = (actual - want).norm() / want.norm()
            assert distance <= case["tol"]["rel_l2"], f"{role}: relative L2 {distance:.4f}"
        else:
            torch.testing.assert_close(actual, want, **case["tol"], msg=role)


def denoising_of(pipeline: Flux3ActionPipeline) -> Denoising:
    (denoising,) = (stage for stage in pipeline.stages if isinstance(stage, Denoising))
    return denoising
