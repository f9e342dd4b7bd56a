"""Safetensors checkpoints: every rule of the format, sharded folders, strict loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel.errors import CheckpointError
from pipelines.checkpoint import load_into, open_checkpoint

CASES = Path(__file__).parents[1] / "cases"
C19 = CASES / "C19_headers"
VERDICTS = json.loads((C19 / "expected.json").read_text())


def as_file(source: Path, folder: Path) -> Path:
    return shutil.copy(source, folder / source.name)


def as_folder(source: Path, folder: Path) -> Path:
    shutil.copy(source, folder / "model.safetensors")
    return folder


def as_indexed_folder(source: Path, folder: Path) -> Path:
    shutil.copy(source, folder / source.name)
    verdict = next(row for row in VERDICTS if row["file"] == source.name)
    weight_map = dict.fromkeys(verdict["values"] or {"w": None}, source.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load_all(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    slots = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in checkpoint.entries.items()}
    load_into(checkpoint, slots)
    return slots


@pytest.mark.parametrize("laid_out", [as_file, as_folder, as_indexed_folder])
@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: verdict["file"].partition(".")[0])
def test_c19_same_verdict_on_every_path(verdict, laid_out, tmp_path):
    path = laid_out(C19 / verdict["file"], tmp_path)
    if verdict["expect"] == "load":
        loaded = load_all(path)
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == verdict["values"]
    else:
        with pytest.raises(CheckpointError, match=r"\.safetensors|holds no tensors"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("git_lfs_pointer", "Git LFS pointer"),
        ("html_page", "HTML page"),
        ("zip_or_pickle", "zip or pickle"),
        ("metadata_int", "__metadata__"),
        ("good_metadata_only", "no tensors"),
    ],
)
def test_c19_refusal_says_what_the_file_is(file, what):
    with pytest.raises(CheckpointError, match=what):
        open_checkpoint(C19 / f"{file}.safetensors")


def test_duplicate_name_in_the_header_is_refused(tmp_path):
    info = '"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f"{{{info},{info}}}".encode()
    path = tmp_path / "twice.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="'w' appears twice"):
        open_checkpoint(path)


@pytest.mark.parametrize("folder", ["C18_good", "C18_stray_shard", "C18_unlisted_tensor"])
def test_c18_loads_what_the_index_names(folder):
    loaded = load_all(CASES / folder)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "blocks.0.w": [[0, 1, 2], [3, 4, 5]],
        "blocks.0.b": [0.5, 0.5, 0.5],
        "head.w": [[10, 11], [12, 13]],
    }


def test_c18_unlisted_tensor_is_reported(caplog):
    checkpoint = open_checkpoint(CASES / "C18_unlisted_tensor")
    assert checkpoint.unlisted == ("extra.w (in model-00002-of-00002.safetensors)",)
    assert "extra.w" in caplog.text


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("C18_missing_shard", r"model-00002-of-00002\.safetensors.*download may be incomplete"),
        ("C18_tensor_not_in_shard", r"blocks\.0\.b.*download may be incomplete"),
        ("C18_truncated_shard", r"model-00002-of-00002\.safetensors.*incomplete download"),
        ("C18_path_outside", r"\.\./C18_good.*outside the folder"),
    ],
)
def test_c18_index_that_does_not_match_is_refused(folder, named):
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(CASES / folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused_by_name_in_file_and_folder(name, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"[Pp]ickle"):
        open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"[Pp]ickle"):
        open_checkpoint(tmp_path)


def test_folder_with_several_files_and_no_index_is_ambiguous(tmp_path):
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="more than one safetensors file"):
        open_checkpoint(tmp_path)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "w.safetensors"
    tensors = {
        "dit.a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "dit.b": torch.tensor([1.5, 2.5]),
        "dit.q": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
        "extra.head": torch.zeros(1),
    }
    save_file(tensors, path)
    return open_checkpoint(path)


def slots(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    fitting = {"a": torch.zeros(2, 3), "b": torch.zeros(2), "q": torch.zeros(2).to(torch.float8_e4m3fn)}
    return {**fitting, **changes}


def test_loads_into_views_and_converts_float_dtypes(saved):
    fused = torch.zeros(4, 3, dtype=torch.float32)
    into = slots(a=fused[2:], b=torch.zeros(2, dtype=torch.bfloat16))
    load_into(saved, into, prefix="dit.", ignore=["extra."])
    assert torch.equal(fused, torch.cat([torch.zeros(2, 3), torch.arange(6.0).view(2, 3)]))
    assert into["b"].tolist() == [1.5, 2.5]
    assert into["q"].float().tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"a": torch.zeros(3, 2)}, r"dit\.a: shape \[2, 3\], the model has \[3, 2\]"),
        ({"q": torch.zeros(2)}, r"dit\.q: torch.float8_e4m3fn, the model has torch.float32"),
        ({"b": torch.zeros(2).to(torch.float8_e4m3fn)}, r"dit\.b: torch.float32, the model has torch.float8"),
        ({"b": torch.zeros(2, dtype=torch.int64)}, r"dit\.b: torch.float32, the model has torch.int64"),
        ({"c": torch.zeros(1)}, r"1 missing tensors: dit\.c"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(saved, changes, fault):
    into = slots(**changes)
    with pytest.raises(CheckpointError, match=fault):
        load_into(saved, into, prefix="dit.", ignore=["extra."])
    assert all(not slot.float().any() for slot in into.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_taken_is_not_called_another_architecture(tmp_path, dtype):
    save_file({"w": torch.ones(2).to(dtype)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError) as refused:
        load_into(open_checkpoint(tmp_path), {"w": torch.zeros(2)})
    message = str(refused.value)
    assert f"1 tensors have a dtype that is not taken: w: {dtype}, the model has torch.float32" in message
    assert "bfloat16, float16 and float32 stand for each other" in message
    assert "convert the file, or fetch the released ones" in message
    assert "architecture" not in message


def test_unexpected_tensors_are_named(saved):
    with pytest.raises(CheckpointError, match=r"1 unexpected tensors: extra\.head"):
        load_into(saved, slots(), prefix="dit.")
