"""Benchmarks that take nothing but a folder and need a CUDA device: what they say before they touch one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


@pytest.fixture(params=["flux3_action", "flux3_variants", "region_overhead"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = import_module(request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return script


def ended_with(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> object:
    """The exit code."""
    monkeypatch.setattr("sys.argv", [f"{script.__name__}.py", *options])
    with pytest.raises(SystemExit) as ended:
        script.main()
    return ended.value.code


def test_help_prints_the_usage(script, monkeypatch, capsys) -> None:
    assert ended_with(script, monkeypatch, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: {script.__name__}.py [-h] OUT_FOLDER\n")


def test_unknown_arguments_are_refused(script, monkeypatch, capsys, tmp_path: Path) -> None:
    assert ended_with(script, monkeypatch, str(tmp_path / "out"), "--fast") == 2
    assert "error: unrecognized arguments: --fast" in capsys.readouterr().err


def test_without_a_cuda_device_it_is_said_in_a_line(script, monkeypatch, capsys, tmp_path: Path) -> None:
    assert ended_with(script, monkeypatch, str(tmp_path / "out")) == 2
    assert capsys.readouterr().err == f"{script.__name__}.py needs a CUDA device; this machine has none.\n"
    assert not (tmp_path / "out").exists()
