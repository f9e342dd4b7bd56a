"""What the variants of FLUX.2 are: classes, layers that are read, and released or tiny widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipelines.flux2.text_encoder import MISTRAL3, QWEN3, LanguageModel


@dataclass(frozen=True, kw_only=True)
class Flux2Config:
    """One variant.

    pipeline: class of its diffusers pipeline. text_layers: hidden states that make a prompt embedding.
    distilled: runs without classifier-free guidance. embedded_guidance: the scale is an input of the
    transformer instead. steps, guidance: of requests where the user leaves them open.
    transformer, vae, scheduler: arguments of the diffusers classes for synthetic weights; text_encoder:
    content of its config.json.
    """

    pipeline: Literal["Flux2KleinPipeline", "Flux2Pipeline"]
    language_model: LanguageModel
    text_layers: tuple[int, ...]
    distilled: bool
    embedded_guidance: bool
    steps: int
    guidance: float
    transformer: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any]

    @property
    def classifier_free_guidance(self) -> bool:
        """Whether a scale above 1 runs a second pass with the empty prompt."""
        return not (self.distilled or self.embedded_guidance)


def flux2_config(variant: str, size: Literal["tiny", "full"]) -> Flux2Config:
    """variant: 4b, 4b-base, 9b, 9b-base or dev. Source: models spec sections 1 and 9."""
    config = _FULL[variant]
    return config if size == "full" else _tiny(config)


def _qwen3(hidden_size: int, intermediate_size: int) -> dict[str, Any]:
    return {
        "vocab_size": 151936,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1_000_000.0,
    }


_MISTRAL_24B: Mapping[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 1_000_000_000.0,
    "sliding_window": None,
}

_SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}


def _klein(*, heads: int, double: int, single: int, text_encoder: Mapping[str, Any]) -> Flux2Config:
    return Flux2Config(
        pipeline="Flux2KleinPipeline",
        language_model=QWEN3,
        text_layers=(9, 18, 27),
        distilled=True,
        embedded_guidance=False,
        steps=4,
        guidance=1.0,
        transformer={
            "num_layers": double,
            "num_single_layers": single,
            "num_attention_heads": heads,
            "joint_attention_dim": 3 * text_encoder["hidden_size"],
            "guidance_embeds": False,
        },
        text_encoder=text_encoder,
        vae={},  # the class's own defaults
        scheduler=_SCHEDULER,
    )


def _base(klein: Flux2Config) -> Flux2Config:
    """The same networks before distillation, which need more steps and guidance."""
    return replace(klein, distilled=False, steps=50, guidance=4.0)


_KLEIN_4B = _klein(heads=24, double=5, single=20, text_encoder=_qwen3(2560, 9728))
_KLEIN_9B = _klein(heads=32, double=8, single=24, text_encoder=_qwen3(4096, 12288))

_FULL = {
    "4b": _KLEIN_4B,
    "4b-base": _base(_KLEIN_4B),
    "9b": _KLEIN_9B,
    "9b-base": _base(_KLEIN_9B),
    "dev": Flux2Config(
        pipeline="Flux2Pipeline",
        language_model=MISTRAL3,
        text_layers=(10, 20, 30),
        distilled=False,
        embedded_guidance=True,
        steps=50,
        guidance=4.0,
        transformer={
            "num_layers": 8,
            "num_single_layers": 48,
            "num_attention_heads": 48,
            "joint_attention_dim": 3 * _MISTRAL_24B["hidden_size"],
            "guidance_embeds": True,
        },
        text_encoder={"text_config": _MISTRAL_24B},
        vae={},  # likewise
        scheduler=_SCHEDULER,
    ),
}


def _tiny(config: Flux2Config) -> Flux2Config:
    """The same with small widths; images have the same number of tokens."""
    hidden = 32
    text = {
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    is_nested = "text_config" in config.text_encoder
    return replace(
        config,
        text_layers=(1, 2, 3),
        transformer={
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 3 * hidden,
            "axes_dims_rope": (4, 4, 4, 4),
            "guidance_embeds": config.embedded_guidance,
        },
        text_encoder={"text_config": {**text, "sliding_window": None}} if is_nested else text,
        vae={
            "block_out_channels": (4, 4, 8, 8),
            "layers_per_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 4,
        },
    )
