"""Where two results of one request part, and how far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from accel.fusion.compare import first_mismatch
from accel.graphs.tree import distinct_tensors
from accel.record import RunRecord

FILES = "files"


class ComparedResult(Protocol):
    """outputs: every stage output by "stage.field", in pipeline order."""

    @property
    def outputs(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where a result departs from eager's.

    stage, field: of the output; `FILES` and a file's name where all outputs are equal.
    tensor: which one of the field's. index: of the element; empty where tensors differ in shape, dtype,
    strides or number. expected, actual: eager's and the other's encoding in hex, or words.
    """

    stage: str
    field: str
    tensor: int
    index: tuple[int, ...]
    expected: str
    actual: str

    def __str__(self) -> str:
        at = f"tensor {self.tensor}{list(self.index)}" if self.index else "as a whole"
        return f"{self.stage}.{self.field}, {at}: eager {self.expected}, accelerated {self.actual}"


def breaks_promise(stage: str, record: RunRecord) -> bool:
    """Whether a first difference in this stage is one too many: tiers other than `exact` may change bits.

    record: of the accelerated pipeline. Stages before a first difference gave equal bits.
    """
    return stage not in record.stages or record.stages[stage].tier == "exact"


def first_difference(expected: ComparedResult, actual: ComparedResult) -> Difference | None:
    """Compare every tensor of every stage output, down to the bit. Waits for the device."""
    for name, value in expected.outputs.items():
        stage, _, field = name.partition(".")
        mine, other = distinct_tensors(value), distinct_tensors(actual.outputs[name])
        if len(mine) != len(other):
            words = (f"{len(mine)} tensors", f"{len(other)} tensors")
            return _difference(stage, field, 0, (), *words)
        for tensor, (left, right) in enumerate(zip(mine, other, strict=True)):
            found = first_mismatch(left, right)
            if found is not None:
                return _difference(stage, field, tensor, found.index, found.expected, found.actual)
    return None


def relative_error(expected: Any, actual: Any) -> float | None:
    """How far one stage output is from another: the norm of their difference over that of `expected`.

    Norms are L2, over all tensors of the output. `None` where that is no finite number: tensors of other
    shapes, NaN, nothing but zeros. Waits for the device.
    """
    mine, other = distinct_tensors(expected), distinct_tensors(actual)
    if [tensor.shape for tensor in mine] != [tensor.shape for tensor in other]:
        return None
    differences = (left.float() - right.float() for left, right in zip(mine, other, strict=True))
    norm = _norm(tensor.float() for tensor in mine)
    error = _norm(differences) / norm if norm else math.nan
    return error if math.isfinite(error) else None


def _norm(tensors: Iterable[Tensor]) -> float:
    """Over all of them together."""
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))


def first_file_difference(expected: Mapping[str, bytes], actual: Mapping[str, bytes]) -> Difference | None:
    """Compare files by name; `index` is the first byte that differs."""
    if expected.keys() != actual.keys():
        names = (", ".join(sorted(files)) or "none" for files in (expected, actual))
        return _difference(FILES, "names", 0, (), *names)
    for name, mine in expected.items():
        other = actual[name]
        if len(mine) != len(other):
            return _difference(FILES, name, 0, (), f"{len(mine)} bytes", f"{len(other)} bytes")
        if mine != other:
            at = next(i for i, (left, right) in enumerate(zip(mine, other, strict=True)) if left != right)
            return _difference(FILES, name, 0, (at,), f"0x{mine[at]:02x}", f"0x{other[at]:02x}")
    return None


def _difference(
    stage: str, field: str, tensor: int, index: tuple[int, ...], expected: str, actual: str
) -> Difference:
    return Difference(stage=stage, field=field, tensor=tensor, index=index, expected=expected, actual=actual)
