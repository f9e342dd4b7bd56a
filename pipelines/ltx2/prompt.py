"""Prompts to token ids, as LTX-2's text encoder takes them (LTX-2 spec section 4)."""

from __future__ import annotations

from typing import Any

from accel.errors import CheckpointError
from pipelines.prompt_tokens import TokenizedPrompt, tokenize


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

    @staticmethod
    def text(prompt: str) -> str:
        """What is encoded of a prompt."""
        return prompt.strip()

    def encode(self, prompt: str) -> TokenizedPrompt:
        """Tokenise one prompt, valid Unicode; the empty one is a negative prompt that says nothing."""
        return tokenize(self._tokenizer, self.text(prompt), length=self.length)
