"""What results say of the request they answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks import run
from tasks.config import compose


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("model=flux2_klein", {"steps": 4, "guidance": 1.0, "seed": 0, "images": 1}),
        ("model=ltx2", {"frames": 9, "sigmas": [1.0, 0.5], "seed": 0, "image": None}),
    ],
)
def test_a_result_tells_what_the_settings_left_open(model: str, expected: dict, tmp_path: Path) -> None:
    sizes = ["model.height=64", "model.width=64"]
    if model == "model=ltx2":
        sizes += ["model.frames=9", "model.steps=2"]
    config = compose(model, *sizes, "size=tiny", "device=cpu", "task.repeats=1", "logger=quiet")
    run.main(config, folder=tmp_path / "out")
    asked = json.loads((tmp_path / "out" / "result.json").read_text())["asked"]
    assert asked["prompt"] == config.prompt
    assert {name: asked[name] for name in expected} == expected
    if model == "model=ltx2":
        assert asked["guidance"]["video"]["text"] == 3.0


def test_notes_and_pictures_of_a_request_are_left_out(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 64)).save(tmp_path / "first.png")
    picture = f"model.images=[{tmp_path / 'first.png'}]"
    small = ("model.height=64", "model.width=64", "model.steps=1", picture)
    config = compose("model=flux2_klein", *small, "size=tiny", "device=cpu", "task.repeats=1", "logger=quiet")
    run.main(config, folder=tmp_path / "out")
    asked = json.loads((tmp_path / "out" / "result.json").read_text())["asked"]
    assert set(asked) == {"prompt", "seed", "height", "width", "steps", "guidance", "images"}
