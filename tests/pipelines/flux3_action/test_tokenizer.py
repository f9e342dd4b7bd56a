"""Captions: chat template, buckets of 80, truncation, right padding (spec section 7)."""

from __future__ import annotations

import pytest
import torch

from accel.errors import CheckpointError, ObservationError
from pipelines.flux3_action.tokenizer import CaptionTokenizer, build_tiny_tokenizer

OVERHEAD = 19  # template tokens of the byte-level tokenizer: "user", newlines, "assistant" and three markers


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_tokenizer()


@pytest.fixture
def library_tokenizer():
    return build_tiny_tokenizer()._tokenizer


def test_template_around_the_caption(tokenizer, library_tokenizer):
    encoded = tokenizer.encode("lift the cube é")
    text = library_tokenizer.decode(encoded.input_ids[0, : encoded.n_tokens])
    assert text == "<|im_start|>user\nlift the cube é<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("characters", "length"), [(0, 80), (80 - OVERHEAD, 80), (81 - OVERHEAD, 160), (8192 - OVERHEAD, 8192)]
)
def test_bucket(tokenizer, characters, length):
    encoded = tokenizer.encode("a" * characters)
    assert encoded.input_ids.shape == (1, length)
    assert encoded.input_ids.dtype == torch.int64
    assert (encoded.n_tokens, encoded.truncated) == (characters + OVERHEAD, False)


def test_padding_is_on_the_right(tokenizer, library_tokenizer):
    encoded = tokenizer.encode("lift")
    padding = encoded.input_ids[0, encoded.n_tokens :]
    assert padding.unique().tolist() == [library_tokenizer.pad_token_id]


def test_long_caption_is_cut_at_8192_and_says_so(tokenizer):
    encoded = tokenizer.encode("a" * 9000)
    assert (encoded.input_ids.shape, encoded.n_tokens, encoded.truncated) == ((1, 8192), 8192, True)


def test_text_that_is_not_unicode_is_refused(tokenizer):
    with pytest.raises(ObservationError, match="prompt"):
        tokenizer.encode("lift \ud800")


def test_left_padding_is_refused(library_tokenizer):
    library_tokenizer.padding_side = "left"
    with pytest.raises(CheckpointError, match="padding on the right"):
        CaptionTokenizer(library_tokenizer)


def test_missing_template_is_refused(library_tokenizer):
    library_tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match="chat template"):
        CaptionTokenizer(library_tokenizer)


def test_saved_folder_gives_the_same_ids(tokenizer, library_tokenizer, tmp_path):
    library_tokenizer.save_pretrained(tmp_path)
    loaded = CaptionTokenizer.from_folder(tmp_path)
    caption = "Put the mug on the shelf, it's 30 cm away."
    assert torch.equal(loaded.encode(caption).input_ids, tokenizer.encode(caption).input_ids)
    assert loaded.vocabulary == tokenizer.vocabulary


def test_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        CaptionTokenizer.from_folder(tmp_path)
