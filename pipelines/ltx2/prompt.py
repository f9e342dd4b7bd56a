"""Prompts to token ids, as LTX-2's text encoder takes them (LTX-2 spec section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel.errors import CheckpointError, ObservationError


@dataclass(frozen=True)
class TokenizedPrompt:
    """input_ids, attention_mask: int64 (1, L) on the CPU, padded on the left; the mask is 1 at real tokens.

    truncated: the prompt lost its end.
    """

    input_ids: Tensor
    attention_mask: Tensor
    truncated: bool


class PromptTokenizer:
    """One prompt, stripped and padded to a fixed number of tokens."""

    def __init__(self, tokenizer: Any, *, length: int) -> None:
        """tokenizer: transformers' fast tokenizer of the text encoder; it is set to pad on the left.

        length: L, tokens that every prompt is padded or cut to.
        Raises: CheckpointError if it has nothing to pad with.
        """
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token is None:
            raise CheckpointError(
                "the tokenizer has neither a padding nor an end token. Fetch its folder again."
            )
        self._tokenizer = tokenizer
        self.length = length

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        return len(self._tokenizer)

    def encode(self, prompt: str) -> TokenizedPrompt:
        """Tokenise one prompt; the empty one is a negative prompt that says nothing.

        Raises: ObservationError for text that is not valid Unicode.
        """
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ObservationError(f"prompt: not valid Unicode ({error.reason}). Send plain text.") from error
        text = prompt.strip()
        whole = self._tokenizer(text, add_special_tokens=True)["input_ids"]
        padded = self._tokenizer(
            [text],
            padding="max_length",
            max_length=self.length,
            truncation=True,
            add_special_tokens=True,
            return_tensors="pt",
        )
        return TokenizedPrompt(
            padded["input_ids"], padded["attention_mask"], truncated=len(whole) > self.length
        )
