"""Safetensors checkpoints: one file or a sharded folder, opened checked and loaded strictly.

Knows no model. No pickle is ever read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

import torch
from safetensors import safe_open
from torch import Tensor

from accel.errors import CheckpointError
from pipelines.safetensors_header import TensorEntry, read_header
from pipelines.strict_json import read_json_object

_log = logging.getLogger(__name__)

_INCOMPLETE = "The download may be incomplete: fetch the missing files again."
_CONVERTIBLE = frozenset({torch.bfloat16, torch.float16, torch.float32})


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a checkpoint, headers checked, data not yet read.

    path: what was opened, for messages. entries: tensor name -> place.
    unlisted: tensors in the shards that the index does not name; never loaded.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    unlisted: tuple[str, ...] = ()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.safetensors` file, or a folder with one such file or a `*.safetensors.index.json`.

    In a folder with an index only the files it names count. Nothing is read but headers.
    Raises: CheckpointError for missing or damaged files, an index that does not match its shards,
        paths that leave the folder, pickles, and checkpoints without tensors.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder. Check the path.")
    if path.is_dir():
        index = _only(sorted(path.glob("*.safetensors.index.json")), path, "index")
        checkpoint = _open_sharded(path, index) if index else _open_file(_single_file(path))
    else:
        checkpoint = _open_file(path)
    if not checkpoint.entries:
        raise CheckpointError(f"{path}: holds no tensors, so it can't be used as weights.")
    if checkpoint.unlisted:
        _log.warning("%s: tensors not in the index are not loaded: %s", path, first_few(checkpoint.unlisted))
    return checkpoint


def check_fit(
    checkpoint: Checkpoint, slots: Mapping[str, Tensor], *, prefix: str = "", ignore: Iterable[str] = ()
) -> tuple[dict[str, Tensor], dict[str, TensorEntry]]:
    """The slots and the checkpoint's tensors, each by full name, once every tensor fits its slot.

    Arguments as `load_into`; slots may be on the meta device. bf16, fp16 and fp32 convert to each other;
    any other dtype must match.
    Raises: CheckpointError listing the first missing, unexpected or ill-fitting tensors.
    """
    targets = {prefix + name: slot for name, slot in slots.items()}
    skipped = tuple(ignore)
    entries = {
        name: entry
        for name, entry in checkpoint.entries.items()
        if name in targets or not name.startswith(skipped)
    }
    _check_names(checkpoint.path, targets.keys(), entries.keys())
    _check_fit(checkpoint.path, targets, entries)
    return targets, entries


def load_into(
    checkpoint: Checkpoint, slots: Mapping[str, Tensor], *, prefix: str = "", ignore: Iterable[str] = ()
) -> None:
    """Copy every tensor of the checkpoint into its slot, all or nothing being checked first.

    slots: name without `prefix` -> tensor (or view) of the model on any device, written in place.
    prefix: what the checkpoint puts before each name.
    ignore: beginnings of full checkpoint names that are knowingly not loaded.

    Raises: CheckpointError as `check_fit`.
    """
    targets, entries = check_fit(checkpoint, slots, prefix=prefix, ignore=ignore)
    in_order = sorted(entries.items(), key=lambda item: (item[1].file, item[1].begin))
    with torch.no_grad():
        for file, group in groupby(in_order, key=lambda item: item[1].file):
            with safe_open(file, framework="pt") as tensors:
                for name, _ in group:
                    targets[name].copy_(tensors.get_tensor(name))


def first_few(names: Collection[str], *, limit: int = 5) -> str:
    """ "a, b, c and 12 more", sorted."""
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _open_file(path: Path) -> Checkpoint:
    return Checkpoint(path, read_header(path))


def _single_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    named = folder / "model.safetensors"
    file = named if named in files else _only(files, folder, "safetensors file")
    if file is None:
        found = first_few([entry.name for entry in folder.iterdir()]) or "nothing"
        raise CheckpointError(
            f"{folder}: no safetensors file in it (found: {found}). Pickle checkpoints are refused; "
            "download or convert to safetensors."
        )
    return file


def _only(files: list[Path], folder: Path, kind: str) -> Path | None:
    if len(files) > 1:
        names = first_few([file.name for file in files])
        raise CheckpointError(f"{folder}: more than one {kind}: {names}. Name the one to load.")
    return files[0] if files else None


def _open_sharded(folder: Path, index: Path) -> Checkpoint:
    """Check the index against its shards both ways."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names.")
    shards = {
        file: read_header(_shard_path(folder, index, file)) for file in sorted(set(weight_map.values()))
    }
    absent = [f"{name} (in {file})" for name, file in weight_map.items() if name not in shards[file]]
    if absent:
        raise CheckpointError(
            f"{index}: names tensors that their files lack: {first_few(absent)}. {_INCOMPLETE}"
        )
    unlisted = {
        f"{name} (in {file})"
        for file, entries in shards.items()
        for name in entries
        if weight_map.get(name) != file
    }
    entries = {name: shards[file][name] for name, file in weight_map.items()}
    return Checkpoint(folder, entries, tuple(sorted(unlisted)))


def _shard_path(folder: Path, index: Path, file: str) -> Path:
    # Judged by name, not resolved: hub caches keep shards as links to a folder elsewhere.
    parts = PurePosixPath(file)
    if parts.is_absolute() or ".." in parts.parts or "\\" in file or ":" in file:
        raise CheckpointError(f"{index}: file '{file}' lies outside the folder, which is refused.")
    path = folder / parts
    if not path.is_file():
        raise CheckpointError(f"{index}: file '{file}' is missing. {_INCOMPLETE}")
    return path


def _check_names(path: Path, expected: Collection[str], present: Collection[str]) -> None:
    missing, unexpected = set(expected) - set(present), set(present) - set(expected)
    faults = [f"{len(missing)} missing tensors: {first_few(missing)}"] if missing else []
    faults += [f"{len(unexpected)} unexpected tensors: {first_few(unexpected)}"] if unexpected else []
    if faults:
        raise CheckpointError(f"{path}: {'; '.join(faults)}. These weights belong to another architecture.")


def _check_fit(path: Path, targets: Mapping[str, Tensor], entries: Mapping[str, TensorEntry]) -> None:
    pairs = {name: (entry, targets[name]) for name, entry in entries.items()}
    shapes = [
        f"{name}: shape {list(entry.shape)}, the model has {list(slot.shape)}"
        for name, (entry, slot) in pairs.items()
        if entry.shape != tuple(slot.shape)
    ]
    if shapes:
        raise CheckpointError(
            f"{path}: {len(shapes)} tensors do not fit: {first_few(shapes)}. "
            "These weights belong to another architecture or variant."
        )
    dtypes = [
        f"{name}: {entry.dtype}, the model has {slot.dtype}"
        for name, (entry, slot) in pairs.items()
        if entry.dtype != slot.dtype and not {entry.dtype, slot.dtype} <= _CONVERTIBLE
    ]
    if dtypes:
        raise CheckpointError(
            f"{path}: {len(dtypes)} tensors have a dtype that is not taken: {first_few(dtypes)}. bfloat16, "
            "float16 and float32 stand for each other, any other has to be the model's: convert the file, "
            "or fetch the released ones."
        )
