"""The header of one safetensors file, checked before any of its numbers is trusted.

A file is `u64 little-endian N | N bytes of JSON | tensor data`. The JSON maps a name to
`{dtype, shape, data_offsets}`; the offsets must tile the data exactly. Source: the safetensors format.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

import torch

from accel.errors import CheckpointError
from pipelines.strict_json import parse_json_object

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_MAX_HEADER_BYTES = 100_000_000  # the reference reader's limit
_MAX_ELEMENTS = 2**63 - 1
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. begin, end: byte offsets into the data part of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Name -> entry of every tensor in the file; empty for a file with metadata alone.

    Raises: CheckpointError for a file that breaks any rule of the format, naming the rule, and for
        Git LFS pointers, web pages and pickles, saying what they are.
    """
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path}: pickle checkpoints can run code when read and are refused. Convert it to safetensors."
        )
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            header_bytes = _header_length(path, start, size)
            file.seek(8)
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}). Check the path.") from error
    if not raw.startswith(b"{"):
        raise _damaged(path, start, "the header does not start with '{'")
    header = parse_json_object(raw, f"{path}: header")
    _check_metadata(path, header.pop("__metadata__", None))
    entries = {name: _entry(path, name, info) for name, info in header.items()}
    _check_tiling(path, entries, size - 8 - header_bytes)
    return entries


def _header_length(path: Path, start: bytes, size: int) -> int:
    if size < 8:
        raise _damaged(path, start, f"{size} bytes, shorter than the 8-byte header length")
    length = int.from_bytes(start[:8], "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise _damaged(path, start, f"declares a header of {length} bytes in a file of {size}")
    return length


def _damaged(path: Path, start: bytes, fault: str) -> CheckpointError:
    """Say what the file really is when its first bytes tell."""
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return CheckpointError(f"{path}: is a Git LFS pointer, not the weights. Run `git lfs pull`.")
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return CheckpointError(f"{path}: is an HTML page, not the weights. Download the file itself.")
    if start.startswith(b"PK\x03\x04") or (
        start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    ):
        return CheckpointError(
            f"{path}: is a zip or pickle checkpoint, which is refused. Convert it to safetensors."
        )
    return CheckpointError(f"{path}: not a valid safetensors file: {fault}. Download it again.")


def _check_metadata(path: Path, metadata: Any) -> None:
    # The reference reader takes null for no metadata.
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: '__metadata__' must map text to text. Write the file again.")


def _entry(path: Path, name: str, info: Any) -> TensorEntry:
    def fault(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor '{name}': {what}. Download it again.")

    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise fault("needs dtype, shape and data_offsets")
    dtype = DTYPES.get(info["dtype"]) if isinstance(info["dtype"], str) else None
    if dtype is None:
        raise fault(f"unknown dtype {info['dtype']!r}")
    shape, offsets = info["shape"], info["data_offsets"]
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise fault(
            f"shape {shape} and data_offsets {offsets} must be whole numbers >= 0, offsets two of them"
        )
    if any(count > _MAX_ELEMENTS for count in (*shape, *accumulate(shape, mul))):
        raise fault(f"shape {shape} overflows 64 bits")
    begin, end = offsets
    expected = prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise fault(
            f"shape {shape} of {info['dtype']} takes {expected} bytes, data_offsets hold {end - begin}"
        )
    return TensorEntry(path, dtype, tuple(shape), begin, end)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(path: Path, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    """Every data byte belongs to exactly one tensor."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            what = "overlaps another tensor" if entry.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor '{name}' {what}. Download the file again.")
        position = entry.end
    if position != data_bytes:
        what = "is cut short (incomplete download?)" if data_bytes < position else "has trailing bytes"
        raise CheckpointError(
            f"{path}: {what}: {data_bytes} bytes of data, the header describes {position}. Download it again."
        )
