"""Prompts to token ids, as the text encoders of FLUX.2 were trained to see them."""

from __future__ import annotations

from typing import Any

from accel.errors import CheckpointError
from pipelines import local_tokenizer
from pipelines.flux2.text_encoder import MAX_TOKENS, LanguageModel
from pipelines.prompt_tokens import TokenizedPrompt, tokenize


class PromptTokenizer:
    """One prompt through the chat template, padded or cut to `MAX_TOKENS`."""

    def __init__(self, tokenizer: Any, language_model: LanguageModel) -> None:
        """tokenizer: of transformers. Raises: CheckpointError without a chat template or padding token."""
        if not tokenizer.chat_template or tokenizer.pad_token_id is None:
            raise CheckpointError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template or no padding token. "
                "Fetch this folder again."
            )
        self._tokenizer = tokenizer
        self._language_model = language_model

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        return len(self._tokenizer)

    def encode(self, prompt: str) -> TokenizedPrompt:
        """prompt: valid Unicode."""
        kind = self._language_model
        text = self._tokenizer.apply_chat_template(
            kind.messages(prompt), tokenize=False, **kind.template_options
        )
        return tokenize(self._tokenizer, text, length=MAX_TOKENS, add_special_tokens=kind.adds_special_tokens)


def build_synthetic_tokenizer(language_model: LanguageModel) -> Any:
    """A byte-level tokenizer with the special tokens and the form of the released chat template."""
    return local_tokenizer.build(
        pad_token="<pad>",
        bos_token=None if language_model.adds_special_tokens else "<s>",
        special_tokens=language_model.special_tokens,
        chat_template=language_model.chat_template,
    )
