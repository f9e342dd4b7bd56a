"""Qwen3-VL's language model as a caption encoder (spec section 7)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextDecoderLayer,
    Qwen3VLTextRotaryEmbedding,
)

from accel.errors import CheckpointError
from pipelines.strict_json import read_json_object

PaddingPositions = Literal["running", "ones"]

# How the language model's tensors are called in a Qwen3-VL folder, an older one, and a text-only one.
_KEY_PREFIXES = ("model.language_model.", "language_model.model.", "model.")


class CaptionEncoder(nn.Module):
    """Embedding and the decoder layers below the last one that is read.

    Parameters are uninitialised, on the current default device; fill them through `checkpoint_slots`.
    D: hidden size, K: number of output layers.

    config: transformers' `Qwen3VLTextConfig`.
    output_layers: ascending; k stands for the input of layer k, 0 for the embedding output.
    padding_positions: rotary positions of padding rows: `running` counts on, `ones` puts all at 1.
    Raises: CheckpointError if `output_layers` does not fit the config.
    """

    def __init__(
        self,
        config: Any,
        *,
        output_layers: Sequence[int],
        dtype: torch.dtype,
        padding_positions: PaddingPositions = "running",
    ) -> None:
        super().__init__()
        layers = tuple(output_layers)
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or not 0 <= layers[-1] < config.num_hidden_layers
        ):
            raise CheckpointError(
                f"text output layers {list(layers)} must be ascending and below {config.num_hidden_layers}, "
                "the text encoder's number of layers. Use the text encoder that the package names."
            )
        config = copy.deepcopy(config)
        # Explicit: the mask passed to the layers is then used as it is, never rebuilt.
        config._attn_implementation = "sdpa"
        self.output_layers = layers
        self.padding_positions = padding_positions
        self.dtype = dtype
        device = torch.get_default_device()
        with torch.device("meta"):  # transformers initialises what it allocates; this does not
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Qwen3VLTextDecoderLayer(config, k) for k in range(layers[-1]))
        self.to(dtype).to_empty(device=device)
        with torch.device("cpu"):  # fp32 frequencies, the same bits on every device
            self.rotary = Qwen3VLTextRotaryEmbedding(config)
        self.rotary.to(device)
        self.eval().requires_grad_(False)

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Key, without the prefix that `text_key_prefix` finds -> the storage to copy that tensor into."""
        return {name: parameter.data for name, parameter in self.named_parameters()}

    def prepare(self, n_tokens: int, length: int, *, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward` needs besides the ids, for a caption of `n_tokens` padded to `length`.

        Returns: mask, bool (1, 1, L, L), true where a row attends: causal, padding keys masked;
            cos and sin, (1, L, head_dim), model dtype.
        """
        row = torch.arange(length, device=device)
        mask = (row[None, :] <= row[:, None]) & (row < n_tokens)[None, :]
        positions = row if self.padding_positions == "running" else torch.where(row < n_tokens, row, 1)
        dtype_source = torch.empty(0, dtype=self.dtype, device=device)
        cos, sin = self.rotary(dtype_source, positions.view(1, 1, length))
        return mask[None, None], cos, sin

    def forward(self, input_ids: Tensor, attention_mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """ids int64 (1, L), mask bool or additive (1, 1, L, L) -> context (1, L, K * D), layer-major.

        Rows of padding are kept.
        """
        hidden = self.embed_tokens(input_ids)  # (1, L, D)
        inputs = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=(cos, sin), attention_mask=attention_mask)
            inputs.append(hidden)
        return torch.cat([inputs[k] for k in self.output_layers], dim=-1)


def read_text_config(folder: Path) -> Any:
    """`Qwen3VLTextConfig` of a Qwen3-VL folder, or of a folder with the language model alone.

    Raises: CheckpointError naming the file.
    """
    path = folder / "config.json"
    raw = read_json_object(path)
    text = raw.get("text_config", raw)
    if not isinstance(text, dict) or text.get("model_type", "qwen3_vl_text") not in (
        "qwen3_vl_text",
        "qwen3_vl",
    ):
        raise CheckpointError(f"{path}: not a Qwen3-VL text encoder. Use the one that the package names.")
    try:
        return Qwen3VLTextConfig.from_dict(text)
    except Exception as error:  # transformers validates with several kinds
        raise CheckpointError(f"{path}: not a usable text config ({error}). Fetch it again.") from error


def text_key_prefix(names: Iterable[str]) -> str:
    """What the checkpoint puts before the language model's own names; the released spelling if unknown."""
    present = set(names)
    spelled = (prefix for prefix in _KEY_PREFIXES if f"{prefix}embed_tokens.weight" in present)
    return next(spelled, _KEY_PREFIXES[0])


def unused_text_keys(config: Any, output_layers: Sequence[int], prefix: str) -> tuple[str, ...]:
    """Beginnings of the keys that captions don't need: vision tower, layers above, final norm, head."""
    above = range(max(output_layers), config.num_hidden_layers)
    layers = (f"{prefix}layers.{k}." for k in above)
    return ("model.visual.", "visual.", "lm_head.", "language_model.lm_head.", f"{prefix}norm.", *layers)


def qwen3_vl_4b_config() -> Any:
    """Architecture of the released text encoder."""
    return Qwen3VLTextConfig(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        rope_parameters=_rope(sections=[24, 20, 20]),
    )


def tiny_text_config(*, vocabulary: int) -> Any:
    """The same architecture with small widths."""
    return Qwen3VLTextConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=8192,
        rope_parameters=_rope(sections=[4, 2, 2]),
    )


def _rope(*, sections: list[int]) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": sections,
        "mrope_interleaved": True,
    }
