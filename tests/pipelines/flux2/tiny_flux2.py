"""Tiny FLUX.2 components of the stock classes, in our pipeline and in that of diffusers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from torch import Tensor
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

from accel.policy import AccelPolicy
from pipelines import synthetic_weights
from pipelines.flux2.config import flux2_config
from pipelines.flux2.images import reference_from
from pipelines.flux2.pipeline import Flux2Pipeline
from pipelines.flux2.prompt import PromptTokenizer, build_synthetic_tokenizer
from pipelines.flux2.request import ImageRequest, ImageResult
from pipelines.flux2.text_encoder import PromptEncoder
from pipelines.flux2.weights import Components
from pipelines.module_building import build_modules
from pipelines.pipeline import Placement

CPU = torch.device("cpu")
VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same component objects in both pipelines."""

    ours: Flux2Pipeline
    theirs: Any
    text_layers: tuple[int, ...]


def stock_text_encoder(variant: str) -> Any:
    """The whole language model, with its head and for `dev` its vision tower."""
    config = flux2_config(variant, "tiny")
    if variant != "dev":
        return Qwen3ForCausalLM(Qwen3Config.from_dict(dict(config.text_encoder)))
    text = {"model_type": "mistral", **config.text_encoder["text_config"]}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=VISION))


def make_pair(variant: str, dtype: torch.dtype, policy: AccelPolicy, device: torch.device = CPU) -> Pair:
    components, theirs = make_components(variant, dtype, device)
    ours = Flux2Pipeline(
        components,
        model="flux2_dev" if variant == "dev" else "flux2_klein",
        policy=policy,
        placement=Placement(device=device, dtype=dtype, size="tiny", size_reason="a test"),
        outputs_mean_nothing=True,
    )
    return Pair(ours=ours, theirs=theirs, text_layers=components.config.text_layers)


@cache
def make_components(variant: str, dtype: torch.dtype, device: torch.device = CPU) -> tuple[Components, Any]:
    """Ours, and the pipeline of diffusers around the same objects."""
    config = flux2_config(variant, "tiny")
    modules: dict[str, Any] = build_modules(
        {
            "transformer": partial(Flux2Transformer2DModel, **config.transformer),
            "vae": partial(AutoencoderKLFlux2, **config.vae),
            "text_encoder": partial(stock_text_encoder, variant),
        },
        fill=lambda name, module: synthetic_weights.fill(module, seed=3),
        dtype=dtype,
        device=device,
    )
    statistics = torch.Generator().manual_seed(4)
    bn = modules["vae"].bn
    bn.running_mean.copy_(torch.randn(bn.running_mean.shape, generator=statistics))
    bn.running_var.copy_(0.5 + torch.rand(bn.running_var.shape, generator=statistics))
    tokenizer = build_synthetic_tokenizer(config.language_model)
    scheduler = FlowMatchEulerDiscreteScheduler(**config.scheduler)
    theirs = getattr(diffusers, config.pipeline)(
        scheduler=scheduler,
        tokenizer=tokenizer,
        **modules,
        **({} if variant == "dev" else {"is_distilled": config.distilled}),
    )
    theirs.set_progress_bar_config(disable=True)
    base = modules["text_encoder"].model
    encoder = PromptEncoder(
        base.language_model if variant == "dev" else base, output_layers=config.text_layers
    )
    components = Components(
        config=config,
        transformer=modules["transformer"],
        vae=modules["vae"],
        text_encoder=encoder.eval(),
        tokenizer=PromptTokenizer(tokenizer, config.language_model),
        scheduler=scheduler,
        description="tiny",
    )
    return components, theirs


def both(
    pair: Pair, *, prompt: str = "a cat", pictures: tuple[Any, ...] = (), **settings: Any
) -> tuple[ImageResult, Tensor, Tensor]:
    """Run one request through both: our result, their final latents (tokens) and images."""
    values = {"seed": 7, "height": 32, "width": 48, "steps": 2, "guidance": 1.0, "images": 1} | settings
    references = tuple(reference_from(image, name="image") for image in pictures)
    result = pair.ours.run(ImageRequest(prompt=prompt, references=references, **values))
    latents: list[Tensor] = []

    def keep(pipe: Any, index: int, timestep: Tensor, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(kept["latents"])
        return kept

    pixels = pair.theirs(
        prompt=prompt,
        image=list(pictures) or None,
        height=values["height"],
        width=values["width"],
        num_inference_steps=values["steps"],
        guidance_scale=values["guidance"],
        num_images_per_prompt=values["images"],
        generator=torch.Generator("cpu").manual_seed(values["seed"]),
        text_encoder_out_layers=pair.text_layers,
        output_type="pt",
        callback_on_step_end=keep,
    ).images
    return result, latents[-1], pixels
