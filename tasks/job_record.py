"""job.json: which job of a sweep wrote to a folder, when and where it ran. Free of torch."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from accel.errors import SamebitError
from pipelines.output_folder import OutputFolder

JOB_FILE = "job.json"
CPU = "cpu"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job of a sweep.

    number: as Hydra counts jobs. overrides: without plus signs and those of Hydra's own node.
    model, accel, task: names of the choices.
    begin, end: seconds since 1970, UTC, loading included; `end` is `None` while the job runs, and for
        good if its process was killed.
    earlier: begin and end of the times before that the job ran in this folder, killed or failed; one that
        was killed ran until the next began, at the latest.
    machine: the same for all processes of one machine since it was started; says nothing else about it.
    device: `cpu`, or the UUID of the GPU, which is the same whatever number a process gives it.
    """

    number: int
    overrides: tuple[str, ...]
    model: str
    accel: str
    task: str
    begin: float
    end: float | None = None
    earlier: tuple[tuple[float, float], ...] = ()
    machine: str
    device: str = CPU


@contextlib.contextmanager
def recorded(
    folder: Path, *, number: int, overrides: Sequence[str], model: str, accel: str, task: str, device: str
) -> Iterator[None]:
    """Record the begin of a job, and its end however it ends; of a job that is repeated, both times.

    device: as configured: auto, cpu, cuda or cuda:N.
    Raises: OutputError when the folder can't be written to.
    """
    begin, before = time.time(), read_record(folder)
    record = JobRecord(
        number=number,
        overrides=tuple(overrides),
        model=model,
        accel=accel,
        task=task,
        begin=begin,
        earlier=() if before is None else (*before.earlier, (before.begin, before.end or begin)),
        machine=_machine(),
    )
    _write(folder, record)
    try:
        yield
    finally:
        _write(folder, replace(record, end=time.time(), device=_used_device(device)))


def read_record(folder: Path) -> JobRecord | None:
    """The record of the job that wrote to this folder; `None` where there is none that can be read."""
    try:
        return msgspec.json.decode((folder / JOB_FILE).read_bytes(), type=JobRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def _write(folder: Path, record: JobRecord) -> None:
    OutputFolder(folder, lock=None).write({JOB_FILE: msgspec.json.encode(asdict(record))})


def _used_device(name: str) -> str:
    """Asked at the end: a job that never loaded torch used no other device than the CPU."""
    torch = sys.modules.get("torch")
    if torch is None:
        return CPU
    from pipelines.build import choose_device

    try:
        device = choose_device(name)
        return CPU if device.type == CPU else str(torch.cuda.get_device_properties(device).uuid)
    except (SamebitError, RuntimeError):  # no such device, or one that a fault has made unusable
        return CPU


def _machine() -> str:
    identity = _BOOT_ID.read_text() if _BOOT_ID.exists() else str(uuid.getnode())
    return hashlib.sha256(identity.encode()).hexdigest()[:12]
