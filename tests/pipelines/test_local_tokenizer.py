"""The tokenizer that is built without files."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from pipelines import local_tokenizer

TEXT = "ein Hund,\n  猫 🐘"


def test_any_text_comes_back() -> None:
    tokenizer = local_tokenizer.build(pad_token="<pad>")
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) == len(TEXT.encode())
    assert max(ids) < len(tokenizer)


def test_special_tokens_are_one_token_each() -> None:
    tokenizer = local_tokenizer.build(
        pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", special_tokens=["<turn>", "<pad>"]
    )
    bos, turn, x = (tokenizer.convert_tokens_to_ids(token) for token in ("<bos>", "<turn>", "x"))
    assert tokenizer("<turn>x")["input_ids"] == [bos, turn, x]
    assert tokenizer("<turn>x", add_special_tokens=False)["input_ids"] == [turn, x]
    assert len(tokenizer) == 256 + 4


def test_padding_goes_to_the_side_asked_for() -> None:
    right = local_tokenizer.build(pad_token="<pad>")
    left = local_tokenizer.build(pad_token="<pad>", padding_side="left")
    masks = [t("ab", padding="max_length", max_length=4)["attention_mask"] for t in (right, left)]
    assert masks == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_it_survives_a_folder(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}<turn>{{ message.content }}{% endfor %}"
    built = local_tokenizer.build(
        pad_token="<pad>", bos_token="<bos>", special_tokens=["<turn>"], chat_template=template
    )
    built.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    messages = [{"role": "user", "content": TEXT}]
    assert read.apply_chat_template(messages, tokenize=False) == "<bos><turn>" + TEXT
    assert read(TEXT)["input_ids"] == built(TEXT)["input_ids"]
