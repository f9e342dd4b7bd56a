"""Ctrl-C and signals while results are written."""

from __future__ import annotations

import signal
import threading

import pytest

from pipelines.termination import Terminated, ending_cleanly
from tasks.delayed_signals import delaying_signals

pytestmark = pytest.mark.usefixtures("default_signals")


@delaying_signals()
def write(files: list[str], *signals: signal.Signals) -> None:
    for number in signals:
        signal.raise_signal(number)
    files.append("result.json")


def test_ctrl_c_acts_when_everything_is_written() -> None:
    files: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        write(files, signal.SIGINT)
    assert files == ["result.json"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_termination_keeps_its_exit_code() -> None:
    files: list[str] = []
    with ending_cleanly(), pytest.raises(Terminated) as error:
        write(files, signal.SIGTERM)
    assert (files, error.value.code) == (["result.json"], 143)


def test_who_asks_twice_does_not_wait() -> None:
    files: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        write(files, signal.SIGINT, signal.SIGINT)
    assert files == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    files: list[str] = []
    with ending_cleanly():
        write(files, signal.SIGHUP, signal.SIGHUP)
    assert files == ["result.json"]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_an_error_passes_where_no_signal_came() -> None:
    with pytest.raises(ValueError, match="full"), delaying_signals():
        raise ValueError("full")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_write_too() -> None:
    files: list[str] = []
    thread = threading.Thread(target=write, args=(files,))
    thread.start()
    thread.join()
    assert files == ["result.json"]
