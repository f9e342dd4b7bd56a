"""Prompts to a fixed number of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel.errors import ConfigError, ObservationError


@dataclass(frozen=True)
class TokenizedPrompt:
    """input_ids, attention_mask: int64 (1, L) on the CPU; the mask is 0 at padding.

    truncated: the prompt was longer and lost its end.
    """

    input_ids: Tensor
    attention_mask: Tensor
    truncated: bool


def tokenize(tokenizer: Any, text: str, *, length: int, add_special_tokens: bool = True) -> TokenizedPrompt:
    """`text` padded or cut to L tokens on the side that the tokenizer pads and cuts.

    tokenizer: of transformers. length: L. add_special_tokens: those that the tokenizer puts around a text.
    """
    whole = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    padded = tokenizer(
        [text],
        padding="max_length",
        max_length=length,
        truncation=True,
        add_special_tokens=add_special_tokens,
        return_tensors="pt",
    )
    return TokenizedPrompt(padded["input_ids"], padded["attention_mask"], truncated=len(whole) > length)


def required_prompt(prompt: str | None, *, of: str, example: str) -> str:
    """The prompt of an `of`, say an image. Raises: ConfigError for none or a blank one, with an example."""
    if not (prompt and prompt.strip()):
        raise ConfigError(f"prompt: is empty; say what the {of} shows, e.g. prompt='{example}'.")
    return prompt


def require_unicode(text: str, *, name: str = "prompt") -> None:
    """Raises: ObservationError for text that is not valid Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ObservationError(f"{name}: not valid Unicode ({error.reason}). Send plain text.") from error
