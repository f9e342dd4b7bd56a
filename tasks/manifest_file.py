"""`accel.manifest`: the signatures of earlier runs, captured before the first request of this one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from accel.graphs.manifest import Manifest, UsedSignature, read_manifest, write_manifest
from pipelines.catalogue import ModelSettings
from pipelines.pipeline import PipelineDescription
from tasks.config import RunConfig
from tasks.environment import device_facts, software

_log = logging.getLogger("samebit")


class CapturingPipeline(Protocol):
    """What a manifest needs of a pipeline; see `pipelines.pipeline.Pipeline`."""

    @property
    def description(self) -> PipelineDescription: ...
    def capture_manifest(self, manifest: Manifest) -> None: ...
    def used_signatures(self) -> Iterable[UsedSignature]: ...


class ManifestFile:
    """The file that `accel.manifest` names.

    Reading comes before long work, so that a damaged file is noticed at once.
    Raises: ConfigError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifest = read_manifest(path)

    def capture(self, pipeline: CapturingPipeline, model: ModelSettings) -> None:
        """Let the pipeline capture what is listed, unless it was listed on another machine or model."""
        self._manifest = self._manifest.of(_origin(pipeline.description, model))
        if self._manifest.signatures:
            pipeline.capture_manifest(self._manifest)

    def save(self, pipeline: CapturingPipeline) -> None:
        """Add what this run used; a run without graphs leaves the file alone. Raises: OutputError."""
        used = list(pipeline.used_signatures())
        if used:
            write_manifest(self._path, self._manifest.updated(used))
        else:
            _log.info("accel.manifest=%s is not written: this run used no graphs", self._path)


def manifest_of(config: RunConfig) -> ManifestFile | None:
    """The file of `accel.manifest`, read; `None` where none is set. Raises: ConfigError for a damaged one."""
    return None if config.accel.manifest is None else ManifestFile(Path(config.accel.manifest))


def _origin(description: PipelineDescription, model: ModelSettings) -> dict[str, str]:
    versions, device = software(), device_facts(description.device)
    settings = hashlib.sha256(msgspec.json.encode(model, order="sorted")).hexdigest()[:12]
    return {
        "torch": str(versions["torch"]),
        "cuda": versions.get("cuda", "none"),
        "driver": device.get("driver") or "unknown",
        "device": device["name"],
        "model": f"{description.model}, {description.size}, {description.dtype}",
        "settings": settings,
    }
