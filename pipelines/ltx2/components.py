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
from pipelines.ltx2.component_rules import check_fit, check_scheduler, check_upsampler
from pipelines.ltx2.prompt import PromptTokenizer
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
    config = Gemma3TextConfig(**{**values, "attn_implementation": "sdpa"})
    window = config.sliding_window
    if "sliding_attention" in config.layer_types and (window is None or window < 1):
        raise CheckpointError(
            f"text_config.sliding_window is {window}, but layers with sliding_attention need a number of "
            "tokens. Fetch the file again, or correct it."
        )
    model: nn.Module = Gemma3TextModel(config)
    return model
