"""A small real tokenizer, built without files or network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def build(
    *,
    pad_token: str,
    bos_token: str | None = None,
    eos_token: str | None = None,
    special_tokens: Sequence[str] = (),
    chat_template: str | None = None,
    padding_side: Literal["left", "right"] = "right",
) -> Any:
    """A byte-level BPE tokenizer without merges: one token a byte of UTF-8, then the special tokens.

    special_tokens: further ones that the chat template writes. bos_token: put before every text that
    is encoded with special tokens.
    Returns: a `PreTrainedTokenizerFast`; its `len` is the size of the vocabulary.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    named = [token for token in (pad_token, bos_token, eos_token) if token is not None]
    backend.add_special_tokens(list(dict.fromkeys([*named, *special_tokens])))
    if bos_token is not None:
        backend.post_processor = TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, backend.token_to_id(bos_token))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad_token,
        bos_token=bos_token,
        eos_token=eos_token,
        padding_side=padding_side,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
