"""The language models that FLUX.2 reads prompts with: hidden states of a few layers, nothing above them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.flux2.pipeline_flux2 import format_input
from torch import Tensor, nn
from transformers import MistralConfig, MistralModel, Qwen3Config, Qwen3Model

from accel.errors import CheckpointError

MAX_TOKENS = 512
"""Every prompt is padded or cut to this many tokens, padding included in what the transformer sees."""


class PromptEncoder(nn.Module):
    """Embedding and the decoder layers below the last one that is read; no logits, no final norm.

    D: hidden size, K: number of output layers.

    base: transformers' `Qwen3Model` or `MistralModel`, whose modules are shared, not copied.
    output_layers: ascending; k stands for the input of layer k, 0 for the embedding.
    Raises: CheckpointError if the layers do not exist or attend within a window.
    """

    def __init__(self, base: Any, *, output_layers: Sequence[int]) -> None:
        super().__init__()
        _check_layers(base.config, output_layers, available=len(base.layers))
        self.output_layers = tuple(output_layers)
        self.embed_tokens = base.embed_tokens
        self.layers = base.layers[: output_layers[-1]]
        self.rotary_emb = base.rotary_emb

    @property
    def width(self) -> int:
        """Channels of the prompt embeddings, K * D."""
        return len(self.output_layers) * int(self.embed_tokens.embedding_dim)

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0..length-1: (1, length, head_dim), model dtype."""
        positions = torch.arange(length, device=self.embed_tokens.weight.device)[None]
        cos, sin = self.rotary_emb(self.embed_tokens.weight, positions)
        return cos, sin

    def forward(self, input_ids: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """int64 (1, L) -> (1, L, K * D), layer-major; rows of padding are kept.

        mask: bool (1, 1, L, L), true where a row attends; `None` is causal without padding, for which
            attention has its own kernels.
        """
        hidden = self.embed_tokens(input_ids)
        inputs = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=(cos, sin))
            inputs.append(hidden)
        return torch.cat([inputs[k] for k in self.output_layers], dim=-1)


def causal_mask(attention_mask: Tensor) -> Tensor | None:
    """Mask of `PromptEncoder.forward`, on the CPU; `None` where there is no padding, as transformers does.

    attention_mask: (1, L), 1 for tokens, 0 for padding, on the CPU.
    """
    if attention_mask.all():
        return None
    row = torch.arange(attention_mask.shape[1], device="cpu")
    causal = row[None, :] <= row[:, None]
    return (causal & attention_mask.bool())[None, None]


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """One kind of text encoder.

    class_name: in `model_index.json`. tokenizer_classes: likewise. prefixes: as `ModuleSpec` has them.
    beside: beginnings of full checkpoint names of what is no layer: heads and what sees images.
    base: transformers' model without a head. text_config: content of config.json -> its config.
    messages: prompt -> chat messages. template_options: for `apply_chat_template`.
    adds_special_tokens: whether the tokenizer adds its own to the templated text.
    special_tokens, chat_template: of synthetic tokenizers, shaped like the released ones.
    """

    class_name: str
    tokenizer_classes: tuple[str, ...]
    prefixes: tuple[str, ...]
    beside: tuple[str, ...]
    base: Any
    text_config: Callable[[dict[str, Any]], Any]
    messages: Callable[[str], list[dict[str, Any]]]
    template_options: Mapping[str, Any]
    adds_special_tokens: bool
    special_tokens: tuple[str, ...]
    chat_template: str

    def build(self, config: dict[str, Any], *, output_layers: Sequence[int]) -> PromptEncoder:
        """The encoder of a config.json, without the layers that are not read."""
        text = copy.deepcopy(self.text_config(config))
        _check_layers(text, output_layers, available=text.num_hidden_layers)
        text.num_hidden_layers = output_layers[-1] + 1  # the input of the last one is read
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
        text._attn_implementation = "sdpa"
        return PromptEncoder(self.base(text), output_layers=output_layers)

    def unread(self, config: dict[str, Any], *, output_layers: Sequence[int]) -> tuple[str, ...]:
        """Beginnings of full checkpoint names that no encoder holds; config as `build` takes it."""
        above = range(output_layers[-1], self.text_config(config).num_hidden_layers)
        parts = ("norm.", *(f"layers.{index}." for index in above))
        return (*self.beside, *(prefix + part for prefix in self.prefixes for part in parts))


def _check_layers(config: Any, output_layers: Sequence[int], *, available: int) -> None:
    layers = list(output_layers)
    if not layers or layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < available:
        raise CheckpointError(
            f"the text encoder has {available} layers, the inputs of layers {layers} are read. "
            "Use the text encoder that belongs to this model."
        )
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if windowed or (window is not None and window <= MAX_TOKENS):
        raise CheckpointError(
            "the text encoder attends within a sliding window, which FLUX.2's does not. "
            "Use the text encoder that belongs to this model."
        )


def _user_message(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


def _system_and_user_message(prompt: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = format_input([prompt])[0]
    return messages


def _mistral_config(config: dict[str, Any]) -> Any:
    """Config of the language model within a vision-language model's."""
    text = config["text_config"]
    kind = text.get("model_type", "mistral")
    if kind != "mistral":
        raise CheckpointError(
            f"the language model is a {kind}, FLUX.2 reads a mistral. "
            "Use the text encoder that belongs to this model."
        )
    return MistralConfig.from_dict(text)


# What the base class of fast tokenizers calls itself, formerly and now.
_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")

QWEN3 = LanguageModel(
    class_name="Qwen3ForCausalLM",
    tokenizer_classes=("Qwen2TokenizerFast", "Qwen2Tokenizer", *_PLAIN_TOKENIZERS),
    prefixes=("model.",),
    beside=("lm_head.",),
    base=Qwen3Model,
    text_config=Qwen3Config.from_dict,
    messages=_user_message,
    template_options={"add_generation_prompt": True, "enable_thinking": False},
    adds_special_tokens=True,
    special_tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    chat_template=(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    ),
)

MISTRAL3 = LanguageModel(
    class_name="Mistral3ForConditionalGeneration",
    tokenizer_classes=("PixtralProcessor", "LlamaTokenizerFast", *_PLAIN_TOKENIZERS),
    prefixes=("language_model.model.", "model.language_model."),
    beside=(
        "lm_head.",
        "vision_tower.",
        "multi_modal_projector.",
        "language_model.lm_head.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    base=MistralModel,
    text_config=_mistral_config,
    messages=_system_and_user_message,
    template_options={"add_generation_prompt": False},
    adds_special_tokens=False,
    special_tokens=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]"),
    chat_template=(
        "{{ bos_token }}{% for message in messages %}"
        "{% set tag = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}"
        "[{{ tag }}]{% for part in message.content %}{{ part.text }}{% endfor %}[/{{ tag }}]"
        "{% endfor %}"
    ),
)
