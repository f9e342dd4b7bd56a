"""A FLUX 3 Action policy package on disk: variants, native config, manifest (spec section 2)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from accel.errors import CheckpointError, ConfigError
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.policy_config_parsing import parse_policy_config
from pipelines.flux3_action.settings import Variant
from pipelines.strict_json import parse_json_object, read_json_object

VARIANTS: tuple[str, ...] = get_args(Variant)

MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "model.safetensors"
NATIVE_CONFIG_FILES = ("config.native.json", "config.json")
PACKAGE_FILES = (MANIFEST_FILE, WEIGHTS_FILE, *NATIVE_CONFIG_FILES)


@dataclass(frozen=True)
class PolicyPackage:
    """One variant, checked against its manifest. weights: safetensors, every key prefixed `dit.`."""

    folder: Path
    config: PolicyConfig
    weights: Path


def variant_subfolder(variant: str | None) -> str:
    """Subfolder of a variant inside the policy repository; empty for the base variant.

    Raises: ConfigError listing the choices; case matters.
    """
    if variant in (None, "", "base"):
        return ""
    if variant not in VARIANTS:
        raise ConfigError(f"model.variant: unknown variant '{variant}'. Choices: {', '.join(VARIANTS)}.")
    return f"variants/{variant}"


def read_package(folder: Path, *, verify_weights: bool = True) -> PolicyPackage:
    """Read the variant in `folder`. The config is checked against the manifest before it is used.

    verify_weights: hash the weight file too, which reads all of it.
    Raises: CheckpointError for a missing file, a manifest of another kind, a missing entry, another
        digest, or a config that breaks spec section 3.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Check the package path and the variant.")
    digests = _read_manifest(folder)
    config_file = _native_config_file(folder)
    data = config_file.read_bytes()
    _check_digest(config_file, hashlib.sha256(data).hexdigest(), digests)
    config = parse_policy_config(parse_json_object(data, str(config_file)))
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise CheckpointError(f"{weights}: missing. Fetch the package again.")
    _check_digest(weights, _file_digest(weights) if verify_weights else None, digests)
    return PolicyPackage(folder, config, weights)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """File name -> sha256 digest."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, so nothing can be verified. Fetch the package again.")
    manifest = read_json_object(path)
    kind, version = manifest.get("kind"), manifest.get("format_version")
    if kind != "policy_export" or version != 1:
        raise CheckpointError(
            f"{path}: kind {kind!r}, format_version {version!r}; only 'policy_export', 1 is understood."
        )
    digests = manifest.get("sha256")
    if not isinstance(digests, dict):
        raise CheckpointError(f"{path}: 'sha256' must map file names to digests. Fetch the package again.")
    return digests


def _native_config_file(folder: Path) -> Path:
    """The native config; a `config.json` without `action_modality` belongs to LeRobot."""
    for name in NATIVE_CONFIG_FILES:
        path = folder / name
        if path.is_file() and "action_modality" in read_json_object(path):
            return path
    raise CheckpointError(
        f"{folder}: no policy config: neither {' nor '.join(NATIVE_CONFIG_FILES)} holds 'action_modality'. "
        "Check that this is a FLUX 3 Action package."
    )


def _check_digest(path: Path, digest: str | None, digests: dict[str, Any]) -> None:
    """digest: what the file hashes to; `None` checks only that the manifest lists the file."""
    expected = digests.get(path.name)
    if not isinstance(expected, str):
        raise CheckpointError(
            f"{path.parent / MANIFEST_FILE}: no sha256 of {path.name}. Fetch the package again."
        )
    if digest is not None and digest != expected.lower():
        raise CheckpointError(
            f"{path}: sha256 {digest} differs from the manifest's {expected}. "
            "The file was changed or damaged: fetch the package again."
        )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
