"""Captions to token ids, as the text encoder was trained to see them (spec section 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from accel.errors import CheckpointError
from pipelines import local_tokenizer
from pipelines.prompt_tokens import require_unicode
from pipelines.strict_json import read_json_object

MAX_TOKENS = 8192
BUCKET = 80

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TokenizedCaption:
    """input_ids: int64 (1, L) on the CPU, right-padded to the bucket. n_tokens: real ones, 1..L.

    truncated: the caption was longer than the encoder takes and lost its end.
    """

    input_ids: Tensor
    n_tokens: int
    truncated: bool


class CaptionTokenizer:
    """One user message through the chat template, padded on the right to a multiple of 80 tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a transformers tokenizer with a chat template and a padding token.

        Raises: CheckpointError if it lacks either or pads on the left.
        """
        if tokenizer.padding_side != "right":
            raise CheckpointError(
                f"the tokenizer pads on the {tokenizer.padding_side}; this model needs padding on the right. "
                'Set "padding_side": "right" in tokenizer_config.json.'
            )
        if tokenizer.pad_token_id is None or not tokenizer.chat_template:
            raise CheckpointError(
                "the tokenizer has no padding token or no chat template. Fetch its folder again."
            )
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> CaptionTokenizer:
        """Read the tokenizer files of a Hugging Face folder; never downloads, never runs its code.

        Raises: CheckpointError naming the folder.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises many kinds for missing and damaged files
            raise CheckpointError(
                f"{folder}: no usable tokenizer ({error}). Fetch the folder again."
            ) from error
        legacy_template = folder / "chat_template.json"
        if not tokenizer.chat_template and legacy_template.is_file():
            tokenizer.chat_template = read_json_object(legacy_template).get("chat_template")
        return cls(tokenizer)

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        return len(self._tokenizer)

    def encode(self, caption: str) -> TokenizedCaption:
        """Tokenise one caption; the empty one is the null of guidance.

        Raises: ObservationError for text that is not valid Unicode.
        """
        require_unicode(caption)
        message = {"role": "user", "content": caption}
        text = self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        kept = ids[:MAX_TOKENS]
        length = min(BUCKET * math.ceil(len(kept) / BUCKET), MAX_TOKENS)
        padded = kept + [self._tokenizer.pad_token_id] * (length - len(kept))
        input_ids = torch.tensor([padded], dtype=torch.int64, device="cpu")
        return TokenizedCaption(input_ids, len(kept), truncated=len(ids) > len(kept))


def build_tiny_tokenizer() -> CaptionTokenizer:
    """One token a byte, with Qwen's special tokens and chat template."""
    tokenizer = local_tokenizer.build(
        pad_token="<|endoftext|>", special_tokens=("<|im_start|>", "<|im_end|>"), chat_template=_CHAT_TEMPLATE
    )
    return CaptionTokenizer(tokenizer)
