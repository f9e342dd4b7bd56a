"""Strict conversion and the YAML scan, shown with the files of case C15."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta
from omegaconf import OmegaConf

from accel.errors import ConfigError
from tasks.typed import convert
from tasks.yaml_source import scan

CASES = Path(__file__).parent.parent / "cases"


@dataclass(frozen=True, kw_only=True)
class Types:
    seed: int = 0
    resume_at: str = ""
    steps: int = 0
    guidance: float = 0
    guidance2: float = 0
    eps: float = 0
    dtype: str = ""
    camera: str = ""
    verify: bool = False
    revision: str = ""
    lora_tag: str = ""
    max_entries: int = 1
    max_segments: int = 1
    start: str = ""


def load_line(line: str, folder: Path) -> Types:
    """One line of the file as a configuration of its own."""
    path = folder / "one.yaml"
    path.write_text(line + "\n")
    source = scan(path)
    return convert(OmegaConf.to_container(OmegaConf.load(path)), Types, source=source)


LINES = dict(
    line.split(": ")
    for line in (CASES / "C15_types.yaml").read_text().splitlines()
    if line and not line.startswith("#")
)


@pytest.mark.parametrize(
    ("key", "value"), [("steps", 1000), ("eps", 1e-5), ("verify", True), ("start", "2024-01-02")]
)
def test_c15_values_that_are_what_they_look_like(key: str, value: object, tmp_path: Path) -> None:
    assert getattr(load_line(f"{key}: {LINES[key]}", tmp_path), key) == value


@pytest.mark.parametrize(
    "key",
    [
        *("seed", "resume_at", "guidance", "guidance2", "dtype", "camera"),
        *("revision", "lora_tag", "max_entries", "max_segments"),
    ],
)
def test_c15_values_that_yaml_changes_are_refused_as_written(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_line(f"{key}: {LINES[key]}", tmp_path)
    message = str(caught.value)
    assert key in message
    assert LINES[key] in message
    assert "one.yaml:1" in message


@pytest.mark.parametrize("key", ["resume_at", "dtype", "camera", "revision", "lora_tag"])
def test_c15_the_refusal_says_how_to_quote_and_the_quoted_value_is_taken(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{LINES[key]}'"):
        load_line(f"{key}: {LINES[key]}", tmp_path)
    assert getattr(load_line(f"{key}: '{LINES[key]}'", tmp_path), key) == LINES[key]


@dataclass(frozen=True, kw_only=True)
class Version:
    variant: Literal["2.0", "2.3"]


def test_a_choice_that_yaml_reads_as_a_number_says_how_to_quote() -> None:
    with pytest.raises(
        ConfigError, match=r"got 2\.0\. It is read as 2\.0; to keep it as text write variant: '2\.0'"
    ):
        convert({"variant": 2.0}, Version)
    with pytest.raises(ConfigError, match=r"got 2\.1$"):
        convert({"variant": 2.1}, Version)
    assert convert({"variant": "2.0"}, Version).variant == "2.0"


def test_c15_a_duplicate_key_gives_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"'graph' stands twice, on line 1 and on line 4"):
        scan(CASES / "C15_duplicate_key.yaml")


def test_broken_yaml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: 1\nb: [1, 2\nc: 3\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml:\d"):
        scan(path)


@dataclass(frozen=True, kw_only=True)
class Cat:
    name: Literal["cat", "tiger"]
    lives: Annotated[int, Meta(ge=1, le=9)]


@dataclass(frozen=True, kw_only=True)
class Dog:
    name: Literal["dog"]
    tricks: dict[str, bool] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Home:
    pet: Cat | Dog
    guest: Cat | None = None
    sizes: list[float] | None = None
    extras: dict[str, Any] = field(default_factory=dict)


def home(**values: Any) -> Home:
    return convert(values, Home)


def test_the_name_decides_between_dataclasses() -> None:
    assert home(pet={"name": "tiger", "lives": 3}).pet == Cat(name="tiger", lives=3)
    assert home(pet={"name": "dog", "tricks": {"sit": True}}).pet == Dog(name="dog", tricks={"sit": True})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pet": {"name": "dgo"}}, "pet.name: expected one of cat, tiger, dog, got dgo; did you mean 'dog'?"),
        ({"pet": {"name": "cat", "lives": 10}}, "pet.lives: expected a whole number from 1 to 9, got 10"),
        ({"pet": {"name": "cat", "lives": True}}, "pet.lives: expected a whole number from 1 to 9, got True"),
        ({"pet": {"name": "cat"}}, "pet.lives: no value given, and there is no default."),
        ({"pet": {"name": "cat", "live": 3}}, "unknown key 'pet.live'; did you mean 'pet.lives'?"),
        (
            {"pet": {"name": "dog", "tricks": {1: True}}},
            "pet.tricks: the name 1 is not text. Put it in quotes.",
        ),
        ({"pet": "cat"}, "pet: expected a mapping {name: value}, got cat"),
        ({}, "pet: no value given, and there is no default."),
    ],
)
def test_what_is_wrong_is_named_with_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        home(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_are_finite_also_in_lists(number: float) -> None:
    with pytest.raises(ConfigError, match="sizes"):
        home(pet={"name": "dog"}, sizes=[1.0, number])


HALF = "a \udcff cat"
"""What Python makes of a command line with a byte that is not UTF-8."""


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"pet": {"name": "cat", "lives": HALF}}, "pet.lives"),
        ({"pet": {"name": "dog", "title": HALF}}, "pet.title"),
        ({"pet": {"name": "dog", "tricks": {HALF: True}}}, "pet.tricks"),
        ({"pet": {"name": "dog"}, "extras": {"shelf": HALF}}, "extras.shelf"),
        ({"pet": {"name": "dog"}, "extras": {"shelf": [{HALF: 1}]}}, "extras.shelf"),
    ],
)
def test_text_that_is_not_utf8_is_named_with_its_key(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        home(**values)
    assert str(caught.value) == f"{key}: not UTF-8 text. Write it in UTF-8."


def test_what_results_could_not_hold_is_refused_where_it_stands() -> None:
    for extras, words in (
        ({"shelf": {True: 1}}, "JSON can't hold it"),
        ({"shelf": {"cup": math.nan}}, "got {'cup': nan}"),
    ):
        with pytest.raises(ConfigError, match=f"^extras.shelf: .*{words}"):
            home(pet={"name": "dog"}, extras=extras)


def test_every_quoted_text_survives(tmp_path: Path) -> None:
    for text in ("007", "1e5", "off", "12:30", "null", "~", "1_0", "0x10", "gelée d'été, 猫"):
        assert load_line(f"revision: {json.dumps(text)}", tmp_path).revision == text
