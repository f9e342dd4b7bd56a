"""Benchmarks that need a CUDA device: what they say before they touch one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
COMMANDS = ["flux3_action", "flux3_variants", "region_overhead", "forwards", "graphs_timeline record"]


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script, and the word in front of what it writes, where it has one; without a CUDA device."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return str(request.param)


def prog(command: str) -> str:
    """How the program names itself."""
    name, _, word = command.partition(" ")
    return f"{name}.py {word}".rstrip()


def ended_with(command: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> object:
    """The exit code."""
    name, *word = command.split()
    monkeypatch.setattr("sys.argv", [f"{name}.py", *word, *options])
    with pytest.raises(SystemExit) as ended:
        import_module(name).main()
    return ended.value.code


def test_help_prints_the_usage(command, monkeypatch, capsys) -> None:
    assert ended_with(command, monkeypatch, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {prog(command)} [-h]")


def test_unknown_arguments_are_refused(command, monkeypatch, capsys, tmp_path: Path) -> None:
    assert ended_with(command, monkeypatch, str(tmp_path / "out"), "--fast") == 2
    assert "error: unrecognized arguments: --fast" in capsys.readouterr().err


def test_without_a_cuda_device_it_is_said_in_a_line(command, monkeypatch, capsys, tmp_path: Path) -> None:
    assert ended_with(command, monkeypatch, str(tmp_path / "out")) == 2
    assert capsys.readouterr().err == f"{prog(command)} needs a CUDA device; this machine has none.\n"
    assert not (tmp_path / "out").exists()
