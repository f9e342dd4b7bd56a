"""The file of signatures that were used, so that a later process can capture them before it serves.

Source: graph spec section 10.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from accel.errors import ConfigError, OutputError
from accel.graphs.example_arguments import TensorForm

_log = logging.getLogger("samebit")

SCHEMA = 1
MAX_SIGNATURES = 256

Count = Annotated[int, Meta(ge=0)]
Milliseconds = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class UsedSignature:
    """One signature of one region.

    tensors, arguments: see `accel.graphs.example_arguments`. count: calls it served.
    bytes: device memory of its graph. ms_eager, ms_graph: device-synchronised time of one call.
    """

    stage: str
    region: str
    tensors: tuple[TensorForm, ...]
    arguments: dict[str, Any]
    count: Count
    last_used: datetime.date
    bytes: Count
    ms_eager: Milliseconds
    ms_graph: Milliseconds

    @property
    def identity(self) -> str:
        """Equal for equal signatures."""
        what = (self.stage, self.region, self.tensors, self.arguments)
        return msgspec.json.encode(what, order="sorted").decode()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Signatures and what they hold for.

    origin: software, device and model, e.g. {"torch": "2.11.0", "gpu": "NVIDIA H200"}; signatures of
    another origin are of no use.
    """

    origin: dict[str, str] = field(default_factory=dict)
    signatures: Annotated[tuple[UsedSignature, ...], Meta(max_length=MAX_SIGNATURES)] = ()
    schema: int = SCHEMA

    def of(self, origin: dict[str, str]) -> Manifest:
        """This manifest if it holds for `origin`; else an empty one, and one log line that says why."""
        apart = [
            f"{name} {origin.get(name, 'unknown')} vs {self.origin.get(name, 'unknown')}"
            for name in sorted(origin.keys() | self.origin.keys())
            if origin.get(name) != self.origin.get(name)
        ]
        if not apart:
            return self
        if self.signatures:
            _log.warning("The manifest is not used, it was made elsewhere: %s", "; ".join(apart))
        return Manifest(origin=origin)

    def updated(self, used: Iterable[UsedSignature]) -> Manifest:
        """With the counts of `used` added; beyond MAX_SIGNATURES the longest unused are dropped."""
        merged = {signature.identity: signature for signature in self.signatures}
        for new in used:
            old = merged.get(new.identity)
            merged[new.identity] = new if old is None else replace(new, count=old.count + new.count)
        kept = sorted(merged.values(), key=lambda s: (s.last_used, s.count), reverse=True)[:MAX_SIGNATURES]
        return replace(self, signatures=tuple(kept))


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; an empty one where there is no file yet, or one of another schema.

    Raises: ConfigError naming the place, e.g. "$.signatures[0].count".
    """
    try:
        data = path.read_bytes()
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema == SCHEMA:
            return msgspec.json.decode(data, type=Manifest)
        _log.warning("accel.manifest=%s is not used: schema %d, this version reads %d", path, schema, SCHEMA)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"accel.manifest={path}: there is no folder '{path.parent}'.") from None
    except OSError as error:
        raise ConfigError(f"accel.manifest={path} can't be read: {error.strerror}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"accel.manifest={path} is not a manifest: {error}. Delete it; the next run writes a new one."
        ) from error
    return Manifest()


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the file, or leave it as it was.

    Raises: OutputError.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(
            f"accel.manifest={path} can't be written: {error.strerror}. What was there before is unchanged."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Header:
    schema: int
