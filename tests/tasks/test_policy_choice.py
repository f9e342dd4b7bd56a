"""A policy file in the place of a named policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from accel.errors import ConfigError
from accel.policy import AccelPolicy, StageOverride
from pipelines.auto_policy import AutoChoice
from pipelines.policy_file import policy_yaml
from tasks import config
from tasks.command_line import preflight


def policy_of(*argv: str) -> AccelPolicy:
    """What a command line makes of its policy."""
    found: list[AccelPolicy] = []

    def check(tree: object, source: object) -> None:
        found.append(config.build(tree, source).accel)  # type: ignore[arg-type]

    preflight(argv, config_dir=config.CONF, check=check)
    return found[0]


def written(folder: Path) -> Path:
    """A file as `accel=auto` writes it."""
    chosen = AccelPolicy(
        **{**vars(policy_of("accel=graph+fused")), "max_entries": 7, "manifest": "a, b's: {c}.json"}
    )
    chosen.stages["vae"] = StageOverride(enable_cuda_graph=False, fused={"swiglu": False})
    file = folder / "auto.yaml"
    file.write_text(
        policy_yaml(AutoChoice(policy=chosen, stages={}, not_tried={}, seconds=0.0), origin="here")
    )
    return file


def test_a_policy_that_was_written_is_read_back(tmp_path: Path) -> None:
    file = written(tmp_path)
    policy = policy_of(f"accel={file}")
    assert policy.max_entries == 7
    assert policy.manifest == "a, b's: {c}.json"
    assert policy.fused == policy_of("accel=graph+fused").fused
    assert policy.stages == {"vae": StageOverride(enable_cuda_graph=False, fused={"swiglu": False})}


def test_values_on_the_command_line_win(tmp_path: Path) -> None:
    policy = policy_of(f"accel={written(tmp_path)}", "accel.max_entries=2", "accel.fused.swiglu=false")
    assert policy.max_entries == 2
    assert not policy.fused["swiglu"]
    assert policy.fused["modulate"]


@pytest.mark.parametrize("manifest", ["back\\", "it's\\", "a\\'b\\\\", "\\\\share\\graphs.json"])
def test_any_text_is_read_back(tmp_path: Path, manifest: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"manifest": manifest}))
    assert policy_of(f"accel={file}").manifest == manifest


def test_the_home_of_nobody_is_no_such_file() -> None:
    with pytest.raises(ConfigError, match=r"accel=~no-such-user/mine\.yaml: no such file"):
        policy_of("accel=~no-such-user/mine.yaml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("- eager\n", "expected a mapping"),
        ("a: [", "can't be read as YAML"),
        ("max_entrees: 3\n", "did you mean 'accel.max_entries'"),
        ("max_entries: many\n", "max_entries"),
        ("fused: {swigluu: true}\n", "did you mean 'swiglu'"),
        ("max_entries: 2\nmax_entries: 4\n", "'accel.max_entries' stands twice, on line 1 and on line 2"),
        (
            "max_entries: 010\n",
            "mine.yaml:1: accel.max_entries: 010 would be read as a number in another base",
        ),
    ],
)
def test_a_file_that_is_no_policy_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        policy_of(f"accel={file}")
