"""A process that keeps the memory of one request for the next."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tasks.config import ROOT

PROGRAM = """
import resource, sys
import numpy as np
from tasks.heap import keep_freed_memory

def request():
    frame = bytes(2_100_000)
    return [np.ones((3, 360, 640), np.float32) for _ in range(3)], frame

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(5):
    request()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    request()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def fresh_pages(mode: str) -> int:
    command = [sys.executable, "-c", PROGRAM, mode]
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have other habits")
def test_later_requests_touch_no_fresh_memory() -> None:
    kept = fresh_pages("keep")
    assert kept < 500
    assert 10 * kept < fresh_pages("default")  # how many depends on the size of the system's pages
