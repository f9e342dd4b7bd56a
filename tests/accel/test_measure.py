"""Times, intervals and memory."""

from __future__ import annotations

import math
import time

import pytest
import torch

from accel.measure.profile import busy_time, count_host_launches, profile_call
from accel.measure.timing import Lap, median, percentile

CPU = torch.device("cpu")


def test_percentiles_interpolate() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert median(values) == 2.5
    assert percentile(values, 0) == 1
    assert percentile(values, 100) == 4
    assert percentile(values, 95) == pytest.approx(3.85)
    assert percentile([7.0], 95) == 7
    assert math.isnan(median([]))


def test_a_lap_is_the_time_between_its_ends() -> None:
    before = time.perf_counter()
    lap = Lap(CPU)
    made = time.perf_counter()
    time.sleep(0.002)
    ending = time.perf_counter()
    lap.end()
    after = time.perf_counter()
    time.sleep(0.002)  # which does not count
    assert 1e3 * (ending - made) <= lap.ms <= 1e3 * (after - before)


def test_busy_time_counts_overlap_once() -> None:
    assert busy_time([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert busy_time([]) == 0


def test_host_launches_are_calls_that_start_work() -> None:
    started = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch"]
    copied = ["cudaMemcpyAsync", "cudaMemsetAsync"]
    others = ["cudaDeviceSynchronize", "cudaEventRecord", "cudaMalloc", "cudaGraphInstantiate", "aten::mul"]
    assert count_host_launches([*started, *others, *copied]) == 6


def test_a_cpu_has_no_device_numbers() -> None:
    assert profile_call(lambda: pytest.fail("not to be called"), device=CPU) is None
