"""The whole pipeline against reference chunks made by an independent implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.errors import ConfigError
from accel.policy import AccelPolicy
from pipelines.checkpoint import load_into, open_checkpoint
from pipelines.flux3_action.observation import Observation
from pipelines.flux3_action.package import read_package
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.policy_config_parsing import parse_policy_config
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.flux3_action.stages import Denoising, Vae
from pipelines.flux3_action.tokenizer import TokenizedCaption
from pipelines.flux3_action.transformer import ActionTransformer
from pipelines.flux3_action.video_vae import VideoEncoder
from pipelines.flux3_action.video_vae_architecture import read_video_encoder_config
from pipelines.flux3_action.weights import Components
from pipelines.pipeline import Placement

GOLDEN = Path(__file__).parents[2] / "golden" / "flux3"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class GivenContext(nn.Module):
    """Stands in for tokenizer and text encoder: the reference gives text contexts, not prompts."""

    def __init__(self, contexts: dict[str, Tensor]) -> None:
        super().__init__()
        self.captions = list(contexts)
        self.contexts = list(contexts.values())

    def encode(self, caption: str) -> TokenizedCaption:
        index = self.captions.index(caption)
        length = self.contexts[index].shape[1]
        return TokenizedCaption(torch.full((1, length), index), length, False)

    def prepare(self, n_tokens: int, length: int, *, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.empty(0), torch.empty(0), torch.empty(0))

    def forward(self, input_ids: Tensor, *tables: Tensor) -> Tensor:
        return self.contexts[int(input_ids[0, 0])]


def make_pipeline(
    config: PolicyConfig, *, dtype: torch.dtype, contexts: dict[str, Tensor], policy: AccelPolicy
) -> Flux3ActionPipeline:
    package = open_checkpoint(GOLDEN / "package" / "model.safetensors")
    transformer = ActionTransformer(config.transformer, dtype=dtype)
    load_into(package, transformer.checkpoint_slots(), prefix="dit.")
    checkpoint = open_checkpoint(GOLDEN / "vae.safetensors")
    vae = VideoEncoder(read_video_encoder_config(checkpoint), dtype=dtype)
    load_into(checkpoint, vae.checkpoint_slots(), ignore=("model.decoder.",))
    text = GivenContext({caption: context.to(dtype) for caption, context in contexts.items()})
    parts: dict[str, Any] = {"text_encoder": text, "tokenizer": text}
    return Flux3ActionPipeline(
        Components(config=config, transformer=transformer, vae=vae, description="golden", **parts),
        policy=policy,
        placement=Placement(device=torch.device("cpu"), dtype=dtype, size="full", size_reason="golden"),
        outputs_mean_nothing=False,
    )


class Velocities:
    """Keeps what every call of the velocity region returned."""

    def __init__(self, stage: Denoising) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        self._region = stage.velocity
        stage.velocity = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen.append(self._region(*args, **kwargs))
        return self.seen[-1]


@pytest.mark.parametrize("name", ["main", "one_step_no_cfg"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_chunk_matches_the_reference(
    golden: Any, golden_case: Any, eager_policy: AccelPolicy, name: str, precision: str
) -> None:
    case = golden_case(f"e2e_{precision}_{name}")
    tensors = golden("e2e.safetensors")
    settings = case["config"]
    config = read_package(GOLDEN / "package").config
    pipeline = make_pipeline(
        config,
        dtype=DTYPES[precision],
        contexts={"lift": tensors["ctx"], "": tensors["ctx_uncond"]},
        policy=eager_policy,
    )
    denoising = pipeline.stages[3]
    assert isinstance(denoising, Denoising)
    velocities = Velocities(denoising)
    image = tensors["image.cam"].permute(2, 0, 1).float() / 255
    request = pipeline.request(
        Observation(images={"cam": image}, state=tensors["state"].float(), prompt="lift"),
        seed=settings["seed"],
        settings=Flux3Settings(
            steps=settings["num_inference_steps"],
            guidance=settings["guidance"]["video"],
            guidance_action=settings["guidance"]["action"],
            shift=settings["sampler_shift"],
        ),
    )

    result = pipeline.run(request)

    got = {
        "actions": torch.from_numpy(result.actions)[None],
        "final_action": result.outputs["denoising.action_tokens"],
        "final_video": result.outputs["denoising.video_tokens"],
        "vel_video": torch.stack([video for video, _ in velocities.seen]),
        "vel_action": torch.stack([action for _, action in velocities.seen]),
    }
    compared = 0
    for role, tensor in got.items():
        if role not in case["outputs"]:
            continue
        want = tensors[case["outputs"][role]]
        check(tensor.float().reshape(want.shape), want.float(), case["tol"], role)
        compared += 1
    assert compared >= 3
    if f"{precision}.{name}.noise_video" in tensors:
        video, action = denoising.noise(settings["seed"])
        assert torch.equal(video.reshape(-1), tensors[f"{precision}.{name}.noise_video"].reshape(-1))
        assert torch.equal(action.reshape(-1), tensors[f"{precision}.{name}.noise_action"].reshape(-1))


def test_droid_geometry_matches_the_reference(
    golden: Any, golden_case: Any, eager_policy: AccelPolicy
) -> None:
    """2,720 + 340 + 32 + 1 + text tokens, from a latent given by formula."""
    case = golden_case("e2e_fp32_droid_geometry")
    tensors = golden("e2e.safetensors")
    raw = (
        json.loads((GOLDEN / "package" / "config.native.json").read_text())
        | case["config"]["override_policy"]
    )
    config = parse_policy_config(raw)
    pipeline = make_pipeline(
        config,
        dtype=torch.float32,
        contexts={"lift": tensors["ctx"], "": tensors["ctx_uncond"]},
        policy=eager_policy,
    )
    y = torch.arange(17, dtype=torch.float64)[:, None]
    x = torch.arange(23, dtype=torch.float64)[None, :]
    c = torch.arange(96, dtype=torch.float64)[:, None, None]
    latent = torch.sin(0.37 * c + 0.61 * y + 0.23 * x + 0.01 * y * x).float()[None, :, None]
    vae = pipeline.stages[1]
    assert isinstance(vae, Vae)
    vae._vae.encode = lambda pixels: latent  # type: ignore[method-assign]
    images = {camera: torch.zeros(3, 360, 640) for camera in config.cameras}
    denoising = pipeline.stages[3]
    assert isinstance(denoising, Denoising)
    velocities = Velocities(denoising)

    result = pipeline.run(
        pipeline.request(Observation(images=images, state=tensors["state"].float(), prompt="lift"))
    )

    outputs = case["outputs"]
    got = {
        "actions": torch.from_numpy(result.actions),
        "final_action": result.outputs["denoising.action_tokens"],
        "vel_action": torch.stack([action for _, action in velocities.seen]),
        "final_video_first_6_tokens": result.outputs["denoising.video_tokens"][:, :6],
    }
    for role, tensor in got.items():
        want = tensors[outputs[role]]
        check(tensor.reshape(want.shape), want, case["tol"], role)
    video, action = denoising.noise(0)
    assert torch.equal(action.reshape(-1), tensors[outputs["action_noise"]].reshape(-1))
    head = tensors[outputs["video_noise_first_6_tokens"]]
    assert torch.equal(video[:, :6].reshape(-1), head.reshape(-1))


def check(got: Tensor, want: Tensor, tolerance: dict[str, float], role: str) -> None:
    if "rel_l2" in tolerance:
        distance = (got - want).norm() / want.norm()
        assert distance <= tolerance["rel_l2"], f"{role}: relative L2 {distance:.4f}"
        return
    torch.testing.assert_close(got, want, atol=tolerance["atol"], rtol=tolerance["rtol"], msg=role)


@pytest.mark.parametrize(
    ("seed", "settings", "named"),
    [
        (-1, {}, "seed=-1"),
        (0, {"steps": 0}, "model.steps=0"),
        (0, {"horizon": 9}, "model.horizon=9"),
        (0, {"guidance": -1.0}, "model.guidance=-1.0"),
        (0, {"shift": 0.0}, "model.shift=0.0"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(
    eager_policy: AccelPolicy, seed: int, settings: dict[str, Any], named: str
) -> None:
    config = read_package(GOLDEN / "package").config
    pipeline = make_pipeline(config, dtype=torch.float32, contexts={}, policy=eager_policy)
    observation = Observation(images={}, state=torch.zeros(8), prompt="")
    with pytest.raises(ConfigError, match=named):
        pipeline.request(observation, seed=seed, settings=Flux3Settings(**settings))
