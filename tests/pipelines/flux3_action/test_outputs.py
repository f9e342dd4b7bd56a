"""Files of a chunk of actions (spec sections 5, 9, 11; case C24)."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from accel.errors import OutputError
from pipelines.flux3_action.outputs import GRIPPER, Origin, action_files, channels_of
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.request import ActionResult
from pipelines.flux3_action.synthetic import droid_config

REAL = Origin(config_hash="0123456789ab", outputs_mean_nothing=False)
SYNTHETIC = Origin(config_hash="0123456789ab", outputs_mean_nothing=True)


def policy(modality: str = "action_prediction_droid", width: int = 8) -> PolicyConfig:
    return replace(droid_config("full"), action_modality=modality, action_dim=width)


def result(width: int = 8, *, prompt: str = "lift the red cube", **changes: np.ndarray) -> ActionResult:
    random = np.random.default_rng(0)
    arrays = {
        "actions": random.normal(size=(32, width)).astype(np.float32),
        "state": random.normal(size=width).astype(np.float32),
        "canvas": random.uniform(-1, 1, size=(3, 64, 96)).astype(np.float32),
    }
    return ActionResult(**(arrays | changes), fps=15.0, prompt=prompt, seed=7, outputs={})


def files(
    chunk: ActionResult, *, config: PolicyConfig | None = None, origin: Origin = REAL
) -> dict[str, bytes]:
    return action_files(chunk, channels=channels_of(config or policy()), origin=origin)


def picture(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.filterwarnings("error:Glyph")
def test_letters_that_the_font_lacks_are_no_reason_to_warn() -> None:
    assert picture(files(result(prompt="举起红色方块 🤖"))["actions.png"]).size[0] > 0


def test_npy_is_the_array_bit_for_bit() -> None:
    chunk = result()
    loaded = np.load(io.BytesIO(files(chunk)["actions.npy"]), allow_pickle=False)
    assert loaded.dtype == np.float32
    assert loaded.tobytes() == chunk.actions.tobytes()


def test_json_has_the_same_numbers_with_names_units_and_times() -> None:
    chunk = result()
    read = json.loads(files(chunk)["actions.json"])
    assert np.array_equal(np.array(read["actions"], np.float32), chunk.actions)
    assert np.array_equal(np.array(read["state"], np.float32), chunk.state)
    assert read["channels"][0] == {"name": "joint 1", "unit": "rad"}
    assert read["channels"][7] == {"name": "gripper", "unit": "closed fraction"}
    assert read["time_s"][0] == pytest.approx(1 / 15, abs=1e-6)
    assert len(read["time_s"]) == 32
    assert (read["prompt"], read["seed"], read["fps"]) == ("lift the red cube", 7, 15.0)
    assert read["config_hash"] == "0123456789ab"


def test_unknown_action_space_claims_no_units() -> None:
    config = policy("action_prediction_arm", 6)
    read = json.loads(files(result(6), config=config)["actions.json"])
    assert {channel["unit"] for channel in read["channels"]} == {"dataset units"}
    assert len(read["channels"]) == 6


def test_notes_on_a_request_are_in_json() -> None:
    noted = replace(result(), notes=("prompt: too long.",))
    assert json.loads(files(noted)["actions.json"])["note"] == "prompt: too long."
    assert json.loads(files(noted, origin=SYNTHETIC)["actions.json"])["note"].endswith(
        "nothing. prompt: too long."
    )


def test_synthetic_weights_are_noted_in_json_and_plot() -> None:
    real, synthetic = files(result()), files(result(), origin=SYNTHETIC)
    assert json.loads(real["actions.json"])["note"] == ""
    assert "mean nothing" in json.loads(synthetic["actions.json"])["note"]
    assert real["actions.png"] != synthetic["actions.png"]


def test_every_8_bit_camera_pixel_survives_the_canvas() -> None:
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(3, axis=0)
    canvas = pixels.astype(np.float32) / 255 * 2 - 1
    image = picture(files(result(canvas=canvas))["canvas.png"])
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), pixels.transpose(1, 2, 0))
    assert image.info["seed"] == "7"
    assert image.info["config_hash"] == "0123456789ab"


@pytest.mark.parametrize("width", [1, 6, 8, 14])
def test_plot_decodes_for_any_number_of_channels(width: int) -> None:
    config = policy(width=width)
    image = picture(files(result(width), config=config)["actions.png"])
    image.load()
    assert image.width >= 1000
    assert image.height >= 400


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("prompt", ["", "costs $5 and $6^2$", "été 猫 | \n\t cup", "long " * 500])
def test_any_prompt_can_be_drawn_and_written(prompt: str) -> None:
    written = files(result(prompt=prompt))
    assert json.loads(written["actions.json"])["prompt"] == prompt
    assert picture(written["canvas.png"]).info["prompt"] == prompt
    picture(written["actions.png"]).load()


def test_motionless_chunk_can_be_drawn() -> None:
    still = result(actions=np.zeros((1, 8), np.float32), state=np.zeros(8, np.float32))
    drawn = picture(files(still)["actions.png"])
    assert len(drawn.convert("L").getcolors()) > 2  # axes, lines and text on a plain ground


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "index"), [("actions", (3, 5)), ("state", (2,)), ("canvas", (1, 4, 9))])
def test_values_that_are_not_finite_are_refused(name: str, index: tuple[int, ...], value: float) -> None:
    array = getattr(result(), name).copy()
    array[index] = value
    with pytest.raises(OutputError, match=rf"{name}\[{', '.join(map(str, index))}\] is .*not finite"):
        files(result(**{name: array}))


def test_a_notebook_s_backend_does_not_keep_the_plot_from_being_drawn() -> None:
    """In a process of its own: matplotlib reads the variable once, when it is imported."""
    program = (
        "import numpy as np\n"
        "from pipelines.flux3_action.outputs import GRIPPER, Origin, action_files\n"
        "from pipelines.flux3_action.request import ActionResult\n"
        "result = ActionResult(actions=np.zeros((4, 1), np.float32), state=np.zeros(1, np.float32),\n"
        "    canvas=np.zeros((3, 8, 8), np.float32), fps=15.0, prompt='x', seed=0, outputs={})\n"
        "origin = Origin(config_hash='0', outputs_mean_nothing=False)\n"
        "print(sorted(action_files(result, channels=(GRIPPER,), origin=origin)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "actions.png" in done.stdout, done.stderr


def test_a_plot_that_fails_does_not_cost_the_actions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **kwargs: object) -> bytes:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("pipelines.flux3_action.action_plot.draw_actions", fail)
    result = ActionResult(
        actions=np.zeros((4, 1), np.float32),
        state=np.zeros(1, np.float32),
        canvas=np.zeros((3, 8, 8), np.float32),
        fps=15.0,
        prompt="x",
        seed=0,
        outputs={},
    )
    origin = Origin(config_hash="0", outputs_mean_nothing=False)
    files = action_files(result, channels=(GRIPPER,), origin=origin)
    assert sorted(files) == ["actions.json", "actions.npy", "canvas.png"]
    assert "no fonts" in caplog.text
