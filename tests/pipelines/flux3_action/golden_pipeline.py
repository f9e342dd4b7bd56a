"""The golden package and video encoder as a pipeline whose captions have given contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel.policy import AccelPolicy
from pipelines.checkpoint import load_into, open_checkpoint
from pipelines.flux3_action.observation import Observation
from pipelines.flux3_action.package import read_package
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.tokenizer import TokenizedCaption
from pipelines.flux3_action.transformer import ActionTransformer
from pipelines.flux3_action.video_vae import VideoEncoder
from pipelines.flux3_action.video_vae_architecture import read_video_encoder_config
from pipelines.flux3_action.weights import Components
from pipelines.pipeline import Placement

GOLDEN = Path(__file__).parents[2] / "golden" / "flux3"
CONFIG = read_package(GOLDEN / "package").config


class GivenContext(nn.Module):
    """Stands in for tokenizer and text encoder. A caption ending in "..." counts as truncated."""

    def __init__(self, contexts: dict[str, Tensor]) -> None:
        super().__init__()
        self.captions = list(contexts)
        self.contexts = list(contexts.values())

    def encode(self, caption: str) -> TokenizedCaption:
        index = self.captions.index(caption)
        length = self.contexts[index].shape[1]
        return TokenizedCaption(torch.full((1, length), index, device="cpu"), length, caption.endswith("..."))

    def prepare(self, n_tokens: int, length: int, *, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.empty(0, device="cpu"),) * 3

    def forward(self, input_ids: Tensor, *tables: Tensor) -> Tensor:
        return self.contexts[int(input_ids[0, 0])]


def make_pipeline(
    *,
    contexts: dict[str, Tensor],
    policy: AccelPolicy,
    dtype: torch.dtype = torch.float32,
    config: PolicyConfig = CONFIG,
    weight_scale: float = 1.0,
    **options: Any,
) -> Flux3ActionPipeline:
    """weight_scale: see `scale_weights`. options: further arguments of the pipeline."""
    package = open_checkpoint(GOLDEN / "package" / "model.safetensors")
    transformer = ActionTransformer(config.transformer, dtype=dtype)
    load_into(package, transformer.checkpoint_slots(), prefix="dit.")
    checkpoint = open_checkpoint(GOLDEN / "vae.safetensors")
    vae = VideoEncoder(read_video_encoder_config(checkpoint), dtype=dtype)
    load_into(checkpoint, vae.checkpoint_slots(), ignore=("model.decoder.",))
    for module in (transformer, vae):
        scale_weights(module.eval(), weight_scale)
    text = GivenContext({caption: context.to(dtype) for caption, context in contexts.items()})
    parts: dict[str, Any] = {"text_encoder": text, "tokenizer": text}
    return Flux3ActionPipeline(
        Components(config=config, transformer=transformer, vae=vae, description="golden", **parts),
        policy=policy,
        placement=Placement(device=torch.device("cpu"), dtype=dtype, size="full", size_reason="golden"),
        outputs_mean_nothing=False,
        **options,
    )


def scale_weights(module: ActionTransformer | VideoEncoder, factor: float) -> None:
    """Multiply all weights but the latent statistics, in place."""
    for name, slot in module.checkpoint_slots().items():
        if "z_normalizer" not in name:
            slot.mul_(factor)


def random_contexts(*captions: str) -> dict[str, Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    width = CONFIG.transformer.context_in_dim
    return {
        caption: torch.randn(1, 80, width, generator=generator, dtype=torch.float32, device="cpu")
        for caption in captions
    }


def observation(prompt: str = "lift", *, seed: int = 0) -> Observation:
    generator = torch.Generator("cpu").manual_seed(seed)
    options: dict[str, Any] = dict(generator=generator, dtype=torch.float32, device="cpu")
    image, state = torch.rand(3, 160, 192, **options), torch.rand(CONFIG.action_dim, **options)
    return Observation(images={"cam": image}, state=state, prompt=prompt)
