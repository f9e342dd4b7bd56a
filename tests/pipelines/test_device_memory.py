"""What does not fit is refused with a table, before anything is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel.errors import DeviceMemoryError
from pipelines import device_memory
from pipelines.device_memory import free_bytes, module_bytes, require_fits

CPU = torch.device("cpu")


def test_sizes_come_from_modules_that_are_not_allocated():
    with torch.device("meta"):
        linear = nn.Linear(2**20, 2**20, dtype=torch.bfloat16)
    assert module_bytes(linear) == 2 * (2**40 + 2**20)


def test_shared_weights_count_once():
    linear = nn.Linear(4, 4, bias=False)
    assert module_bytes(nn.ModuleList([linear, linear])) == 64


def test_what_fits_passes():
    assert free_bytes(CPU) > 0
    require_fits({"transformer": 1024, "vae": 1024}, CPU)


def test_what_does_not_fit_is_listed_by_component():
    with pytest.raises(DeviceMemoryError) as refusal:
        require_fits({"transformer": 2**60, "vae": 2**30}, CPU)
    lines = str(refusal.value).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["transformer", "vae", "needed", "margin", "free"]
    assert lines[2].split()[1:] == ["1.00", "GiB"]


@pytest.mark.parametrize(
    ("weights", "total", "fits"),
    [(20, 40, True), (21, 22, False), (90, 100, True), (91, 100, False), (1, 3, True)],
)
def test_a_margin_stays_free(weights: int, total: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "total_bytes", lambda device: total * 2**30)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: total * 2**30)
    needed = {"transformer": weights * 2**30}
    if fits:
        require_fits(needed, CPU)
        return
    with pytest.raises(DeviceMemoryError, match="margin"):
        require_fits(needed, CPU)
