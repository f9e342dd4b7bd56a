"""Constructor values of LTX-2's networks: as released, and the same with small widths.

Values that a class has as its default are left out. Source: LTX-2 spec sections 3 and 10, diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Size = Literal["tiny", "full"]
Values = Mapping[str, Any]

PROMPT_LENGTH = 1024
"""Tokens that prompts are padded to with released weights."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Keyword arguments of each component's class. latent_upsampler: between the passes of two.

    vocoder_class: `LTX2Vocoder` or `LTX2VocoderWithBWE`. text: of transformers' `Gemma3TextConfig`.
    prompt_length: tokens that every prompt is padded to.
    """

    transformer: Values
    connectors: Values
    vae: Values
    audio_vae: Values
    latent_upsampler: Values
    vocoder_class: str
    vocoder: Values
    text: Values
    scheduler: Values
    prompt_length: int


def architecture(variant: str, size: Size) -> Architecture:
    """What `variant` (2.0, 2.0-distilled, 2.3) is made of.

    The released 2.3 video VAE has other decoder widths, which this module does not know: with synthetic
    weights 2.3 has the VAE of 2.0. A folder of weights brings its own values.
    """
    base = _BASE[size]
    if variant == "2.0-distilled":
        return replace(base, scheduler=_DISTILLED_SCHEDULER)
    if variant == "2.3":
        return replace(
            base,
            transformer={**base.transformer, **_TRANSFORMER_23},
            connectors={**base.connectors, **_CONNECTORS_23[size]},
            vocoder_class="LTX2VocoderWithBWE",
            vocoder=_VOCODER_23[size],
        )
    return base


_SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}
_DISTILLED_SCHEDULER: Values = {}  # its noise levels are used as they are

# By pixels a latent: the class would count the temporal halvings among the spatial ones.
_VAE_RATIOS = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}

_BASE = {
    "full": Architecture(
        transformer={"rope_type": "split"},
        connectors={"rope_type": "split"},
        vae=_VAE_RATIOS,
        audio_vae={},
        latent_upsampler={},
        vocoder_class="LTX2Vocoder",
        vocoder={},
        text={  # Gemma 3 12B
            "vocab_size": 262208,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        scheduler=_SCHEDULER,
        prompt_length=PROMPT_LENGTH,
    ),
    "tiny": Architecture(
        transformer={
            "rope_type": "split",
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 8,
            "num_layers": 2,
            "caption_channels": 32,
        },
        connectors={
            "rope_type": "split",
            "caption_channels": 32,
            "text_proj_in_factor": 3,
            "video_connector_num_attention_heads": 4,
            "video_connector_attention_head_dim": 8,
            "video_connector_num_layers": 1,
            "video_connector_num_learnable_registers": 16,
            "audio_connector_num_attention_heads": 4,
            "audio_connector_attention_head_dim": 8,
            "audio_connector_num_layers": 1,
            "audio_connector_num_learnable_registers": 16,
        },
        vae={
            **_VAE_RATIOS,
            "latent_channels": 8,
            "block_out_channels": (8, 8, 8, 8),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_block_out_channels": (8, 16, 32),
            "decoder_layers_per_block": (1, 1, 1, 1),
        },
        audio_vae={
            "base_channels": 4,
            "ch_mult": (1, 1, 1),
            "num_res_blocks": 1,
            "latent_channels": 2,
            "mel_bins": 8,
        },
        latent_upsampler={"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1},
        vocoder_class="LTX2Vocoder",
        vocoder={
            "in_channels": 16,
            "hidden_channels": 64,
            "resnet_kernel_sizes": [3],
            "resnet_dilations": [[1, 3, 5]],
        },
        text={  # the vocabulary is the tiny tokenizer's
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 1024,
            "max_position_embeddings": 2048,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        scheduler=_SCHEDULER,
        prompt_length=128,
    ),
}

_TRANSFORMER_23 = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
}
_CONNECTORS_23 = {
    "full": {
        "video_connector_num_attention_heads": 32,
        "video_connector_num_layers": 8,
        "video_gated_attn": True,
        "audio_connector_num_attention_heads": 32,
        "audio_connector_attention_head_dim": 64,
        "audio_connector_num_layers": 8,
        "audio_gated_attn": True,
        "per_modality_projections": True,
        "proj_bias": True,
    },
    "tiny": {
        "video_connector_num_attention_heads": 2,
        "video_gated_attn": True,
        "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": 4,
        "audio_gated_attn": True,
        "per_modality_projections": True,
        "video_hidden_dim": 16,
        "audio_hidden_dim": 8,
        "proj_bias": True,
    },
}
_VOCODER_23: Mapping[Size, Values] = {
    "full": {},
    "tiny": {
        "in_channels": 16,
        "hidden_channels": 64,
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1, 3, 5]],
        "bwe_in_channels": 16,
        "bwe_hidden_channels": 64,
        "bwe_resnet_kernel_sizes": [3],
        "bwe_resnet_dilations": [[1, 3, 5]],
        "num_mel_channels": 8,
    },
}
