"""Everything a FLUX.2 pipeline is made of, loaded from a diffusers folder or drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from torch import nn

from accel.errors import CheckpointError
from pipelines import synthetic_weights
from pipelines.component_source import ComponentSource
from pipelines.diffusers_folder import DiffusersFolder, ModuleSpec, load_components
from pipelines.flux2.config import Flux2Config, flux2_config
from pipelines.flux2.image_size import PATCH, VAE_SCALE
from pipelines.flux2.prompt import PromptTokenizer, build_synthetic_tokenizer
from pipelines.flux2.text_encoder import PromptEncoder
from pipelines.flux2.widths import own_widths, require_no_other_variant
from pipelines.hub import Hub
from pipelines.module_building import build_modules
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.weights_config import WeightsConfig


@dataclass(frozen=True, kw_only=True)
class Components:
    """Loaded parts, ready for inference. description: where the weights come from, for the run header.

    notes: what every result of these weights must say.
    transformer, vae, scheduler: diffusers' `Flux2Transformer2DModel`, `AutoencoderKLFlux2` and
    `FlowMatchEulerDiscreteScheduler`.
    """

    config: Flux2Config
    transformer: Any
    vae: Any
    text_encoder: PromptEncoder
    tokenizer: PromptTokenizer
    scheduler: Any
    description: str
    notes: tuple[str, ...] = ()


def load_flux2(
    *,
    weights: WeightsConfig,
    variant: str,
    size: Literal["tiny", "full"],
    device: torch.device,
    dtype: torch.dtype,
    hub: Hub | None = None,
    progress: Progress = NULL_PROGRESS,
) -> Components:
    """Load or draw all weights onto `device`.

    size: widths of synthetic weights; folders are `full`.
    Raises: ConfigError for settings that contradict each other, CheckpointError for files that are
        missing, damaged or do not fit, DeviceMemoryError before allocating what does not fit.
    """
    weights.check(size=size)
    config = flux2_config(variant, size)
    if weights.kind == "synthetic":
        source = _synthetic(config, weights.synthetic_seed, f"{size}, {variant}")
    else:
        source = _folder(config, weights, variant, hub)
    modules: dict[str, Any] = source.build(
        check=partial(_check, config, source.tokenizer), dtype=dtype, device=device, progress=progress
    )
    own = own_widths(modules["transformer"].config, config)
    return Components(
        **modules,
        config=config,
        tokenizer=source.tokenizer,
        scheduler=source.scheduler,
        description=source.description + (f", widths of their own: {own}" if own else ""),
        notes=(f"model.variant={variant}: these weights have widths of their own: {own}.",) if own else (),
    )


def _synthetic(config: Flux2Config, seed: int, described: str) -> ComponentSource[PromptTokenizer]:
    language_model = config.language_model
    factories: dict[str, Callable[[], nn.Module]] = {
        "transformer": partial(Flux2Transformer2DModel, **config.transformer),
        "vae": partial(AutoencoderKLFlux2, **config.vae),
        "text_encoder": partial(
            language_model.build, dict(config.text_encoder), output_layers=config.text_layers
        ),
    }
    return ComponentSource(
        scheduler=FlowMatchEulerDiscreteScheduler(**config.scheduler),
        tokenizer=PromptTokenizer(build_synthetic_tokenizer(language_model), language_model),
        build=partial(
            build_modules,
            factories,
            fill=lambda name, module: synthetic_weights.fill(module, seed=seed),
        ),
        description=f"synthetic, seed {seed}, {described}: the images mean nothing",
    )


def _folder(
    config: Flux2Config, weights: WeightsConfig, variant: str, hub: Hub | None
) -> ComponentSource[PromptTokenizer]:
    folder = DiffusersFolder.open(weights, pipelines=(config.pipeline,), hub=hub)
    if bool(folder.index.get("is_distilled", False)) != config.distilled:
        kind = "not distilled" if config.distilled else "distilled"
        raise CheckpointError(
            f"{folder.origin}: is {kind}, unlike model.variant={variant}. Choose the variant that fits."
        )
    language_model = config.language_model
    specs = {
        "transformer": replace(
            ModuleSpec.of(Flux2Transformer2DModel), build=partial(_transformer, config, variant)
        ),
        "vae": ModuleSpec.of(AutoencoderKLFlux2),
        "text_encoder": ModuleSpec(
            class_name=language_model.class_name,
            build=partial(language_model.build, output_layers=config.text_layers),
            prefixes=language_model.prefixes,
            ignore=language_model.unread(dict(config.text_encoder), output_layers=config.text_layers),
        ),
    }
    tokens = folder.tokenizer("tokenizer", classes=language_model.tokenizer_classes)
    return ComponentSource(
        tokenizer=PromptTokenizer(tokens, language_model),
        scheduler=folder.scheduler("scheduler", FlowMatchEulerDiscreteScheduler),
        build=partial(load_components, folder, specs),
        description=f"{folder.origin}, variant {variant}, without a manifest of checksums",
    )


def _transformer(config: Flux2Config, variant: str, content: dict[str, Any]) -> Any:
    """content: of its config.json."""
    transformer = Flux2Transformer2DModel.from_config(content)
    require_no_other_variant(transformer.config, config, variant)
    return transformer


def _check(config: Flux2Config, tokenizer: PromptTokenizer, modules: Mapping[str, Any]) -> None:
    """Sizes at which components meet."""
    transformer, vae, encoder = (modules[name] for name in ("transformer", "vae", "text_encoder"))
    meetings = {
        "text embeddings and joint_attention_dim": (encoder.width, transformer.config.joint_attention_dim),
        "2x2 patches of the VAE's latents and in_channels": (
            PATCH * PATCH * vae.config.latent_channels,
            transformer.config.in_channels,
        ),
        "pixels to a latent of the VAE and of FLUX.2": (
            2 ** (len(vae.config.block_out_channels) - 1),
            VAE_SCALE,
        ),
        "guidance_embeds of the transformer and of the variant": (
            transformer.config.guidance_embeds,
            config.embedded_guidance,
        ),
    }
    for what, (one, other) in meetings.items():
        if one != other:
            raise CheckpointError(
                f"{what} differ: {one} and {other}. These components do not belong together; "
                "fetch them from one folder."
            )
    if tokenizer.vocabulary > encoder.embed_tokens.num_embeddings:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocabulary} tokens, the text encoder "
            f"{encoder.embed_tokens.num_embeddings}. Fetch them from one folder."
        )
