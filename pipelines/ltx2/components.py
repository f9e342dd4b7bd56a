"""Everything an LTX-2 pipeline is made of, loaded from a folder or the hub, or drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE
from torch import nn
from transformers import Gemma3TextConfig, Gemma3TextModel

from accel.errors import CheckpointError, ConfigError
from pipelines import local_tokenizer, synthetic_weights
from pipelines.component_source import ComponentSource
from pipelines.diffusers_folder import DiffusersFolder, ModuleSpec, load_components
from pipelines.ltx2.architectures import PROMPT_LENGTH, Size, architecture
from pipelines.ltx2.defaults import DISTILLED_SIGMAS
from pipelines.ltx2.prompt import PromptTokenizer
from pipelines.ltx2.schedule import moves
from pipelines.module_building import build_modules
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.weights_config import WeightsConfig

_PIPELINES = ("LTX2Pipeline", "LTX2ImageToVideoPipeline")
_TOKENIZERS = ("GemmaTokenizer", "GemmaTokenizerFast")
_CLASSES: Mapping[str, Any] = {
    "transformer": diffusers.LTX2VideoTransformer3DModel,
    "connectors": LTX2TextConnectors,
    "vae": diffusers.AutoencoderKLLTX2Video,
    "audio_vae": diffusers.AutoencoderKLLTX2Audio,
}
_VOCODERS: Mapping[str, Any] = {"LTX2Vocoder": LTX2Vocoder, "LTX2VocoderWithBWE": LTX2VocoderWithBWE}
_SCHEDULER: Any = diffusers.FlowMatchEulerDiscreteScheduler
_TEXT_ENCODER = "Gemma3ForConditionalGeneration"
# Of its checkpoint, the language model alone is read: its spellings, and what is left out.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
_TEXT_UNUSED = (
    "lm_head.",
    "language_model.lm_head.",
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)


@dataclass(frozen=True, kw_only=True)
class Components:
    """Loaded parts, ready for inference, as diffusers and transformers make them.

    text_encoder: the language model of Gemma 3. latent_upsampler: for videos made in two passes; `None`
    for one. description: where the weights come from.
    """

    transformer: Any
    connectors: Any
    vae: Any
    audio_vae: Any
    vocoder: Any
    text_encoder: Any
    scheduler: Any
    tokenizer: PromptTokenizer
    description: str
    latent_upsampler: Any = None


def load(
    *,
    weights: WeightsConfig,
    variant: str,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    stg_blocks: tuple[int, ...] = (),
    two_stage: bool = False,
    working_memory: Callable[[Mapping[str, nn.Module], int], Mapping[str, int]] = lambda modules, tokens: {},
    progress: Progress = NULL_PROGRESS,
) -> Components:
    """Load or draw all weights onto `device`.

    variant: 2.0, 2.0-distilled or 2.3. size: widths of synthetic weights; released ones are `full`.
    stg_blocks: blocks that requests will perturb, checked before anything is allocated.
    two_stage: with the latent upsampler.
    working_memory: all modules, still without memory, and tokens of a prompt -> bytes by name that requests
        will hold beside the weights.
    Raises: ConfigError for settings that contradict each other, CheckpointError for files that are
        missing, damaged or do not fit, DeviceMemoryError before allocating what does not fit.
    """
    weights.check(size=size)
    if weights.kind == "synthetic":
        source = _synthetic(weights.synthetic_seed, variant, size, two_stage=two_stage)
    else:
        source = _folder(weights, variant, two_stage=two_stage)
    check_scheduler(source.scheduler, variant=variant)

    def check(modules: Mapping[str, nn.Module]) -> None:
        check_fit(modules, variant=variant, vocabulary=source.tokenizer.vocabulary)
        if two_stage:
            check_upsampler(modules["latent_upsampler"].config, modules["vae"].config)
        require_blocks(stg_blocks, modules["transformer"])

    modules = source.build(
        check=check,
        working_memory=lambda modules: working_memory(modules, source.tokenizer.length),
        dtype=dtype,
        device=device,
        progress=progress,
    )
    return Components(
        **modules,
        scheduler=source.scheduler,
        tokenizer=source.tokenizer,
        description=source.description,
    )


def check_fit(modules: Mapping[str, Any], *, variant: str, vocabulary: int) -> None:
    """Refuse components that belong to another variant or do not fit each other. Raises: CheckpointError."""
    transformer, connectors = modules["transformer"], modules["connectors"]
    vae, audio_vae, text = modules["vae"], modules["audio_vae"], modules["text_encoder"].config
    config = transformer.config
    audio_width = audio_vae.config.latent_channels * (
        audio_vae.config.mel_bins // audio_vae.mel_compression_ratio
    )
    is_23 = variant == "2.3"
    rules = (
        (
            transformer.prompt_modulation == is_23 and connectors.config.per_modality_projections == is_23,
            f"these weights are not of LTX-{variant}: set model.variant to what they are",
        ),
        (
            config.patch_size == config.patch_size_t == 1,
            "the transformer groups several latents into a token, which LTX-2 does not",
        ),
        (
            vae.config.latent_channels == config.in_channels,
            f"the transformer takes {config.in_channels} video channels, the VAE has "
            f"{vae.config.latent_channels}",
        ),
        (
            (vae.temporal_compression_ratio, vae.spatial_compression_ratio) == (8, 32),
            f"the VAE makes a latent of {vae.temporal_compression_ratio} frames and "
            f"{vae.spatial_compression_ratio} pixels a side, LTX-2's of 8 and 32",
        ),
        (
            audio_width == config.audio_in_channels,
            f"the transformer takes {config.audio_in_channels} audio channels, the audio VAE has "
            f"{audio_width}",
        ),
        (
            not vae.config.timestep_conditioning and not any(vae.config.decoder_inject_noise),
            "the VAE adds noise of its own when it decodes, which this version does not do",
        ),
        (
            (connectors.config.caption_channels, connectors.config.text_proj_in_factor)
            == (text.hidden_size, text.num_hidden_layers + 1),
            f"the connectors take {connectors.config.text_proj_in_factor} states of "
            f"{connectors.config.caption_channels} channels, the text encoder gives "
            f"{text.num_hidden_layers + 1} of {text.hidden_size}",
        ),
        (
            vocabulary <= text.vocab_size,
            f"the tokenizer has {vocabulary} tokens, the text encoder {text.vocab_size}",
        ),
    )
    faults = [fault for holds, fault in rules if not holds]
    if faults:
        raise CheckpointError(f"LTX-2 weights: {'; '.join(faults)}. Use the components of one release.")


def check_upsampler(config: Any, vae_config: Any) -> None:
    """Refuse a latent upsampler that does not double height and width. Raises: CheckpointError."""
    scale = config.rational_spatial_scale if config.use_rational_resampler else 2.0
    if config.temporal_upsample or not config.spatial_upsample or scale != 2.0:
        raise CheckpointError(
            "LTX-2 weights: the latent_upsampler does not double height and width alone, as model.two_stage "
            "needs. Use the spatial upsampler x2 of the release."
        )
    if config.in_channels != vae_config.latent_channels:
        raise CheckpointError(
            f"LTX-2 weights: the latent_upsampler takes {config.in_channels} channels, the VAE has "
            f"{vae_config.latent_channels}. Use the components of one release."
        )


def check_scheduler(scheduler: Any, *, variant: str) -> None:
    """Refuse a scheduler that does not belong to the variant. Raises: CheckpointError."""
    if scheduler.config.stochastic_sampling or scheduler.config.invert_sigmas:
        raise CheckpointError(
            "the scheduler draws noise or runs backwards, which LTX-2 does not. Fetch its folder again."
        )
    if variant == "2.0-distilled" and moves(scheduler, DISTILLED_SIGMAS):
        raise CheckpointError(
            "LTX-2 weights: the scheduler moves the noise levels that 2.0-distilled was trained for, as that "
            "of 2.0 does: set model.variant to what they are, or fetch the distilled release's scheduler."
        )


def require_blocks(blocks: tuple[int, ...], transformer: Any) -> None:
    """Refuse blocks that the transformer lacks. Raises: ConfigError."""
    count = transformer.config.num_layers
    missing = [block for block in blocks if not 0 <= block < count]
    if missing:
        raise ConfigError(
            f"model.stg_blocks: no block {', '.join(map(str, missing))}; "
            f"this transformer has blocks 0 to {count - 1}."
        )


def _synthetic(seed: int, variant: str, size: Size, *, two_stage: bool) -> ComponentSource[PromptTokenizer]:
    plan = architecture(variant, size)
    tokens = local_tokenizer.build(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer = PromptTokenizer(tokens, length=plan.prompt_length)
    classes = {**_CLASSES, "vocoder": _VOCODERS[plan.vocoder_class]}
    if two_stage:
        classes["latent_upsampler"] = LTX2LatentUpsamplerModel
    values = {name: getattr(plan, name) for name in classes}
    classes["text_encoder"] = _text_encoder
    values["text_encoder"] = {"vocab_size": tokenizer.vocabulary, **plan.text}
    return ComponentSource(
        scheduler=_SCHEDULER(**plan.scheduler),
        tokenizer=tokenizer,
        build=partial(
            build_modules,
            {name: partial(made, **values[name]) for name, made in classes.items()},
            fill=lambda name, module: synthetic_weights.fill(module, seed=seed),
        ),
        description=f"synthetic, seed {seed}, {size}, variant {variant}: the video means nothing",
    )


def _folder(weights: WeightsConfig, variant: str, *, two_stage: bool) -> ComponentSource[PromptTokenizer]:
    folder = DiffusersFolder.open(weights, pipelines=_PIPELINES)
    tokens = folder.tokenizer("tokenizer", classes=_TOKENIZERS)
    vocoder = str(folder.class_name("vocoder"))
    if vocoder not in _VOCODERS:
        raise CheckpointError(
            f"{folder.origin}: component 'vocoder' is {vocoder}, expected {' or '.join(_VOCODERS)}. "
            "Fetch the folder again."
        )
    classes = {**_CLASSES, "vocoder": _VOCODERS[vocoder]}
    specs = {name: ModuleSpec.of(library_class) for name, library_class in classes.items()}
    specs["text_encoder"] = ModuleSpec(
        class_name=_TEXT_ENCODER,
        build=lambda config: _text_encoder(**config["text_config"]),
        prefixes=_TEXT_PREFIXES,
        ignore=_TEXT_UNUSED,
    )
    if two_stage:
        specs["latent_upsampler"] = ModuleSpec.of(LTX2LatentUpsamplerModel, wanted_by="model.two_stage=true")
    return ComponentSource(
        scheduler=folder.scheduler("scheduler", _SCHEDULER),
        tokenizer=PromptTokenizer(tokens, length=PROMPT_LENGTH),
        build=partial(load_components, folder, specs),
        description=f"{folder.origin}, variant {variant}",
    )


def _text_encoder(**values: Any) -> nn.Module:
    """values: of the text config; attention by SDPA, as the masks are made for it."""
    model: nn.Module = Gemma3TextModel(Gemma3TextConfig(**{**values, "attn_implementation": "sdpa"}))
    return model
