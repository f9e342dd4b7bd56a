"""Observations from clients and files: what is taken, what is refused, and what the refusal names."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from accel.errors import ConfigError, ObservationError, SamebitError
from pipelines.flux3_action.canvas import compose_canvas
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame, load_image_files, load_npz
from pipelines.flux3_action.settings import ObservationSource
from pipelines.flux3_action.synthetic import droid_config

DROID = droid_config("full")
SIDE_BY_SIDE = replace(
    DROID, camera_layout="side_by_side", camera_keys=("images.scene", "images.wrist"), canvas_hw=(64, 64)
)
STATE = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, 0.25]
CAMERAS = ("wrist", "left", "right")


def frame(height: int = 360, width: int = 640, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


FRAMES = {camera: frame(seed=i) for i, camera in enumerate(CAMERAS)}
UNIT = frame() / 255


def good(**changes):
    """The observation that all rows vary; None takes a key away."""
    raw = {"images": dict(FRAMES), "state": STATE, "prompt": "x"} | changes
    return {key: value for key, value in raw.items() if value is not None}


def with_wrist(image):
    return good(images=FRAMES | {"wrist": image})


def with_nan():
    image = UNIT.astype(np.float32)
    image[5, 5, 1] = np.nan
    return with_wrist(image)


def read_only():
    image = frame()
    image.setflags(write=False)
    return with_wrist(image)


SCENES = {"scene": frame(50, 40), "wrist": frame(30, 30)}

ROWS = {
    "all good": (good(), DROID),
    "missing camera left": (good(images={"wrist": frame(), "right": frame()}), DROID),
    "extra camera ignored": (good(images=FRAMES | {"ceiling": "not even an image"}), DROID),
    "lerobot names": (
        {
            "observation.images.wrist_image_left": frame(),
            "observation.images.exterior_image_1_left": frame(),
            "observation.images.exterior_image_2_left": frame(),
            "observation.state": STATE,
        },
        DROID,
    ),
    "keys with images. prefix": (good(images={f"images.{k}": v for k, v in FRAMES.items()}), DROID),
    "droid camera 180x320": (with_wrist(frame(180, 320)), DROID),
    "droid camera 640x360": (with_wrist(frame(640, 360)), DROID),
    "gray image HxW": (with_wrist(frame()[..., 0]), DROID),
    "RGBA image": (with_wrist(np.zeros((360, 640, 4), np.uint8)), DROID),
    "uint8 CHW array": (with_wrist(frame().transpose(2, 0, 1)), DROID),
    "float array in [0,1]": (with_wrist(UNIT.astype(np.float32)), DROID),
    "float64 array in [0,1]": (with_wrist(UNIT), DROID),
    "float array 0..255": (with_wrist(frame().astype(np.float32)), DROID),
    "float array negative": (with_wrist(UNIT - 0.5), DROID),
    "float array with NaN": (with_nan(), DROID),
    "int64 pixels in range": (with_wrist(frame().astype(np.int64)), DROID),
    "int64 pixels 300": (with_wrist(np.full((360, 640, 3), 300)), DROID),
    "int16 negative": (with_wrist(np.full((360, 640, 3), -1, np.int16)), DROID),
    "bool image": (with_wrist(frame() > 127), DROID),
    "object image": (with_wrist(np.full((360, 640, 3), None)), DROID),
    "read-only array": (read_only(), DROID),
    "string image": (with_wrist("wrist.jpg"), DROID),
    "torch uint8 HWC": (with_wrist(torch.from_numpy(frame())), DROID),
    "torch float CHW": (with_wrist(torch.rand(3, 360, 640)), DROID),
    "torch float HWC": (with_wrist(torch.rand(360, 640, 3)), DROID),
    "torch uint8 CHW": (with_wrist(torch.from_numpy(frame()).permute(2, 0, 1)), DROID),
    "composite uint8 540x640": (good(images={"composite": frame(540, 640)}, prompt=None), DROID),
    "composite wrong size": (good(images={"composite": frame(360, 640)}), DROID),
    "composite with layout single": (
        good(images={"composite": frame(540, 640)}),
        replace(DROID, camera_layout="single", camera_keys=("images.cam",)),
    ),
    "state missing": (good(state=None), DROID),
    "state too short": (good(state=STATE[:7]), DROID),
    "state too long": (good(state=[*STATE, 0.0]), DROID),
    "state shape (1,8)": (good(state=np.array([STATE])), DROID),
    "state ints": (good(state=[0, 1, 2, 3, 4, 5, 6, 1]), DROID),
    "state NaN": (good(state=[*STATE[:7], float("nan")]), DROID),
    "state inf": (good(state=[*STATE[:7], float("inf")]), DROID),
    "state strings": (good(state=["a"] * 8), DROID),
    "observation.state fallback": (good(state=None, **{"observation.state": STATE}), DROID),
    "prompt missing": (good(prompt=None), DROID),
    "prompt list of one": (good(prompt=["x"]), DROID),
    "prompt list of two": (good(prompt=["x", "y"]), DROID),
    "task instead of prompt": (good(prompt=None, task="x"), DROID),
    "unknown layout": (good(), replace(DROID, camera_layout="triptych")),
    "side_by_side odd canvas width": (good(images=SCENES), replace(SIDE_BY_SIDE, canvas_hw=(64, 33))),
    "side_by_side different camera sizes": (good(images=SCENES, prompt=None), SIDE_BY_SIDE),
    "no images at all": (good(images=None), DROID),
    "images not a dict": (good(images=list(FRAMES.values())), DROID),
}
STRICTER = {
    "float array with NaN"
}  # accepted by the recorded implementation, to be refused (spec section 15)


def observation_rows(rows):
    return [row for row in rows if not row["case"].startswith(("config:", "manifest:", "variant"))]


def test_every_recorded_row_is_covered(golden_json):
    assert {row["case"] for row in observation_rows(golden_json("edge_cases.json"))} == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_recorded_row(golden_json, name):
    (row,) = (row for row in golden_json("edge_cases.json") if row["case"] == name)
    raw, config = ROWS[name]
    if row["reference"] == "rejected" or name in STRICTER:
        with pytest.raises(SamebitError):
            compose_canvas(parse_observation(raw, config).images, config)
        return
    observation = parse_observation(raw, config)
    canvas = compose_canvas(observation.images, config)
    assert observation.prompt == row["prompt"]
    assert list(observation.state.shape) == row["state_shape"]
    assert observation.state.dtype == torch.float32
    assert list(canvas.shape) == row["canvas_shape"]
    assert canvas.isfinite().all()


def test_a_camera_that_the_policy_does_not_know_may_come_twice():
    twice = FRAMES | {"ceiling": frame(), "images.ceiling": frame()}
    assert parse_observation(good(images=twice), DROID).images.keys() == FRAMES.keys()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (good(images={"wrist": frame()}), "no camera left, right; this policy needs wrist, left, right"),
        (good(images=None), "no camera wrist, left, right"),
        (good(images=[1]), "images: a mapping.*list"),
        (with_nan(), "camera 'wrist'.*1 of 691200 values are NaN"),
        (good(state=STATE[:7]), r"state: shape \(7,\) holds 7 values; send 8"),
        (good(state=[*STATE[:7], float("nan")]), r"state: .*channel \[7\]"),
        (good(state=[[1], [1, 2]]), "state: no array of numbers.*send 8 numbers"),
        (good(state=torch.ones(8, dtype=torch.bool)), "state: dtype bool"),
        (good(state=torch.ones(8, dtype=torch.complex64)), "state: dtype complex64"),
        (good(state=np.ones(8, bool)), "state: dtype bool"),
        (good(state=torch.ones(8, device="meta")), "state: no array of numbers"),
        (good(state=torch.ones(8).to_sparse()), "state: no array of numbers"),
        (good(state=[1e300] * 8), "state: .*float32"),
        (good(prompt=["a", "b"]), "prompt: 2 captions"),
        (good(prompt=7), "prompt: int"),
        (good(images=FRAMES | {"exterior_image_1_left": frame()}), "two images for camera 'left'"),
    ],
)
def test_refusals_name_the_field(raw, message):
    with pytest.raises(ObservationError, match=message):
        parse_observation(raw, DROID)


@pytest.mark.parametrize(
    "state",
    [
        torch.tensor(STATE),
        torch.tensor(STATE, requires_grad=True),
        torch.tensor(STATE, dtype=torch.float64),
        torch.tensor(STATE)[:, None],
        np.float64(STATE),
    ],
)
def test_state_in_whatever_holds_numbers(state):
    expected = parse_observation(good(), DROID).state
    assert torch.equal(parse_observation(good(state=state), DROID).state, expected)


@pytest.mark.parametrize(
    ("raw", "prompt"),
    [
        (good() | {"prompt": None, "task": "open"}, "open"),
        (good() | {"prompt": "", "task": "open"}, ""),
        (good() | {"task": "open"}, "x"),
    ],
)
def test_the_first_prompt_that_is_given_counts(raw, prompt):
    assert parse_observation(raw, DROID).prompt == prompt


def test_the_first_state_that_is_given_counts():
    raw = good() | {"state": None, "observation.state": STATE}
    assert parse_observation(raw, DROID).state.tolist() == pytest.approx(STATE)


def test_observation_must_be_a_mapping():
    with pytest.raises(ObservationError, match="list"):
        parse_observation([1, 2], DROID)


def test_images_mapping_wins_over_top_level_keys():
    raw = good(**{"observation.images.wrist": np.zeros((360, 640, 3), np.uint8)})
    expected = parse_observation(good(), DROID).images["wrist"]
    assert torch.equal(parse_observation(raw, DROID).images["wrist"], expected)


def test_policy_camera_with_the_name_of_an_alias():
    config = replace(SIDE_BY_SIDE, camera_keys=("images.scene", "images.wrist_image_left"))
    raw = good(images={"scene": frame(8, 8), "wrist_image_left": frame(8, 8)})
    assert list(parse_observation(raw, config).images) == ["scene", "wrist_image_left"]


def test_the_observation_does_not_share_memory_with_the_client():
    state, image = np.array(STATE, np.float32), UNIT.astype(np.float32)
    observation = parse_observation(good(state=state, images=FRAMES | {"wrist": image}), DROID)
    before = observation.state.clone(), observation.images["wrist"].clone()
    state[:] = 0
    image[:] = 0
    assert torch.equal(observation.state, before[0])
    assert torch.equal(observation.images["wrist"], before[1])


# Files


@pytest.fixture
def episode(tmp_path):
    """Two frames in the format of a recorded episode."""
    frames = []
    for step in range(2):
        files = {camera: f"{camera}_{step:03}.png" for camera in CAMERAS}
        for i, name in enumerate(files.values()):
            Image.fromarray(frame(seed=10 * step + i)).save(tmp_path / name)
        frames.append({"step": step, "time_s": step / 15, "state": [step, *STATE[1:]], "images": files})
    document = {"prompt": "lift the red cube", "fps": 15, "cameras": CAMERAS, "frames": frames}
    (tmp_path / "episode.json").write_text(json.dumps(document))
    return tmp_path


def test_episode_frame(episode):
    observation = parse_observation(load_episode_frame(episode, 1), DROID)
    expected = torch.from_numpy(frame(seed=11)).permute(2, 0, 1).float() / 255
    assert observation.prompt == "lift the red cube"
    assert observation.state[0] == 1
    assert torch.equal(observation.images["left"], expected)


def test_broken_episodes(episode):
    with pytest.raises(ObservationError, match="no frame 2; it has frames 0 to 1"):
        load_episode_frame(episode, 2)
    with pytest.raises(ObservationError, match="no frame -1"):
        load_episode_frame(episode, -1)
    with pytest.raises(ObservationError, match=r"elsewhere.*can't be read"):
        load_episode_frame(episode / "elsewhere", 0)
    (episode / "left_000.png").write_bytes((episode / "left_000.png").read_bytes()[:500])
    with pytest.raises(ObservationError, match=r"'left'.*no readable image"):
        load_episode_frame(episode, 0)
    (episode / "wrist_001.png").unlink()
    with pytest.raises(ObservationError, match="'wrist': no file"):
        load_episode_frame(episode, 1)
    for text in ("{", '{"frames": [{"state": "abc", "images": {}}]}', "{}", "[]"):
        (episode / "episode.json").write_text(text)
        with pytest.raises(ObservationError, match=r"episode\.json"):
            load_episode_frame(episode, 0)


def test_image_files(episode):
    files = {camera: episode / f"{camera}_000.png" for camera in CAMERAS}
    observation = parse_observation(load_image_files(files, STATE, prompt="x"), DROID)
    assert torch.equal(observation.images["right"], parse_observation(good(), DROID).images["right"])


def test_npz(tmp_path):
    np.savez(tmp_path / "o.npz", state=np.array(STATE), prompt=np.array("x"), **FRAMES)
    observation = parse_observation(load_npz(tmp_path / "o.npz"), DROID)
    assert observation.prompt == "x"
    assert torch.equal(observation.images["left"], parse_observation(good(), DROID).images["left"])


def test_broken_npz(tmp_path):
    with pytest.raises(ObservationError, match="can't be read"):
        load_npz(tmp_path / "absent.npz")
    np.savez(tmp_path / "objects.npz", state=np.array([{}], dtype=object))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("nothing")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "cut.npz", state=np.zeros(1000))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:500])
    for name in ("objects.npz", "array.npy", "text.npz", "empty.npz", "cut.npz"):
        with pytest.raises(ObservationError, match=name) as error:
            load_npz(tmp_path / name)
        assert "pickle" not in str(error.value)


# Configuration


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one.*found none"),
        ({"episode": "e", "npz": "o.npz"}, "exactly one.*found episode and npz"),
        ({"images": {"wrist": "w.png"}}, "images and state"),
        ({"npz": "o.npz", "frame": 3}, "observation.frame has no meaning with observation.npz"),
        ({"images": {"wrist": "w.png"}, "state": STATE, "frame": 1}, "observation.frame has no meaning"),
        ({"npz": "o.npz", "state": STATE}, "observation.state has no meaning"),
        ({"episode": "e", "state": STATE}, "observation.state has no meaning"),
        ({"episode": "e", "order": "bgr"}, "observation.order.*only with observation.npz"),
        ({"episode": "e", "layout": "chw"}, "observation.layout"),
        ({"images": {"wrist": "w.png"}, "state": STATE, "value_range": (-1, 1)}, "observation.value_range"),
        ({"npz": "o.npz", "value_range": (0, 0)}, "value_range"),
        ({"npz": "o.npz", "value_range": (1, -1)}, "value_range"),
        ({"npz": "o.npz", "value_range": (0, float("inf"))}, "value_range"),
    ],
)
def test_keys_that_contradict_each_other_or_do_nothing(settings, message):
    with pytest.raises(ConfigError, match=message):
        ObservationSource(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"episode": "e", "frame": 3},
        {"npz": "o.npz", "layout": "chw", "order": "bgr", "value_range": (-1, 1)},
        {"images": {"wrist": "w.png"}, "state": STATE},
    ],
)
def test_keys_of_one_source_go_together(settings):
    source = ObservationSource(**settings)
    assert {name: getattr(source, name) for name in settings} == settings
