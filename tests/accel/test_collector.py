"""The garbage collector around captures, in processes of their own: what was frozen concerns all of one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tasks.config import ROOT

PROGRAM = """
import gc, sys, weakref

class Cycle:
    def __init__(self):
        self.itself = self

if "at start" in sys.argv:  # Python 3.12 begins with some objects frozen
    gc.freeze()
from accel.graphs.containment import collector_paused
if "by the application" in sys.argv:
    gc.freeze()
frozen = gc.get_freeze_count() if "by the application" in sys.argv else 0

for _ in range(2):
    before = weakref.ref(Cycle())
    held = Cycle()
    dropped = weakref.ref(held)
    with collector_paused():
        del held
        assert not gc.isenabled()
        if not frozen:  # else an object of before is collected only if the region drops it and collects
            gc.collect()
            assert dropped() is not None
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen, gc.get_freeze_count()
    gc.collect()
    assert before() is None and dropped() is None
"""


@pytest.mark.parametrize("frozen", ["nothing", "at start", "by the application"])
def test_what_is_dropped_after_a_capture_is_collected(frozen: str) -> None:
    command = [sys.executable, "-c", PROGRAM, frozen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
