"""Variants, the choice of the native config, and the manifest (spec section 2)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from accel.errors import CheckpointError, ConfigError
from pipelines.flux3_action.package import VARIANTS, read_package, variant_subfolder

PACKAGE = Path(__file__).parents[2] / "golden" / "flux3" / "package"


@pytest.fixture
def package(tmp_path):
    for name in ("config.native.json", "manifest.json", "model.safetensors"):
        shutil.copy(PACKAGE / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rename_in_manifest(folder: Path, old: str, new: str) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))


def test_golden_variant_rows(golden_json):
    rows = [row for row in golden_json("edge_cases.json") if row["case"].startswith("variant ")]
    assert len(rows) == 10
    for row in rows:
        name = row["case"].removeprefix("variant ")
        variant = None if name == "None" else name.strip("'")
        if row["reference"] == "accepted":
            assert variant_subfolder(variant) == row["subfolder"]
        else:
            with pytest.raises(ConfigError, match=", ".join(VARIANTS)):
                variant_subfolder(variant)


def test_manifest_good(package):
    assert read_package(package).config.action_dim == 8


def test_variant_keeps_its_native_config_in_config_json():
    read = read_package(PACKAGE / variant_subfolder("fp8r"))
    assert read.config.quantization == "fp8r"
    assert read.weights.parent.name == "fp8r"


def test_manifest_config_changed(package):
    edit(package / "config.native.json", sampler_shift=4.0)
    with pytest.raises(CheckpointError, match=r"config\.native\.json: sha256 .* differs"):
        read_package(package)


def test_manifest_weights_changed(package):
    path = package / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: sha256 .* differs"):
        read_package(package)
    read_package(package, verify_weights=False)


@pytest.mark.parametrize("name", ["config.native.json", "model.safetensors"])
def test_manifest_no_hash_entry(package, name):
    rename_in_manifest(package, name, "other")
    with pytest.raises(CheckpointError, match=f"no sha256 of {name}"):
        read_package(package, verify_weights=False)


@pytest.mark.parametrize("change", [{"kind": "checkpoint"}, {"format_version": 2}])
def test_manifest_wrong_kind(package, change):
    edit(package / "manifest.json", **change)
    with pytest.raises(CheckpointError, match="only 'policy_export', 1"):
        read_package(package)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_missing_file(package, name):
    (package / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        read_package(package)


def test_native_preferred_over_config_json(package):
    native = json.loads((package / "config.native.json").read_text())
    (package / "config.json").write_text(json.dumps({**native, "fps": 99.0}))
    assert read_package(package).config.fps == 10.0


def test_config_json_only(package):
    (package / "config.native.json").rename(package / "config.json")
    rename_in_manifest(package, "config.native.json", "config.json")
    assert read_package(package).config.fps == 10.0


def test_native_file_without_modality_gives_way(package):
    (package / "config.native.json").rename(package / "config.json")
    (package / "config.native.json").write_text("{}")
    rename_in_manifest(package, "config.native.json", "config.json")
    assert read_package(package).config.fps == 10.0


def test_config_json_of_another_library_only(package):
    (package / "config.native.json").unlink()
    (package / "config.json").write_text(json.dumps({"type": "pi0"}))
    with pytest.raises(CheckpointError, match="no policy config"):
        read_package(package)


def test_missing_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        read_package(tmp_path / "variants" / "gd")
