"""The native config: defaults, and one refusal for every rule (spec section 3)."""

from __future__ import annotations

import pytest

from accel.errors import CheckpointError
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.policy_config_parsing import parse_policy_config
from pipelines.flux3_action.synthetic import droid_config

DROID = {
    "action_modality": "action_prediction_droid",
    "action_dim": 8,
    "chunk_size": 32,
    "gripper_flip_dims": [-1],
}


@pytest.fixture
def native(golden_json):
    return golden_json("package/config.native.json")


def parse(native, **changes) -> PolicyConfig:
    return parse_policy_config({**native, **changes})


def parse_dit(native, **changes) -> PolicyConfig:
    return parse(native, dit_config={**native["dit_config"], **changes})


# Rows "config: ..." of the golden edge cases -> the change they make. The euler sampler is supported here.
EDGE_ROWS = {
    "history profile": ({"inference_profile": "history"}, {}),
    "unknown sampler": ({"sampler": "heun"}, {}),
    "unknown parameterization": ({"action_parameterization": "velocity"}, {}),
    "image stream in content_streams": ({"content_streams": ["video", "video_cond", "image"]}, {}),
    "content_streams null": ({"content_streams": None}, {}),
    "sampler null": ({"sampler": None}, {}),
    "steps null": ({"num_inference_steps": None}, {}),
    "guidance null": ({"guidance_scale": None, "guidance_scale_action": None}, {}),
    "shift null": ({"sampler_shift": None}, {}),
    "late blocks": ({}, {"depth_late_blocks": 2}),
    "qkv_bias": ({}, {"qkv_bias": True}),
    "gate_type": ({}, {"gate_type": "tanh"}),
    "unknown dit field": ({}, {"depth_early_blocks": 1}),
    "axes do not sum": ({}, {"axes_dim": [6, 4, 4, 4]}),
    "num_heads does not divide": ({}, {"num_heads": 5}),
    "in_channels without video_cond": ({}, {"in_channels": {"video": 96}}),
    "extra trunk streams dropped": ({}, {"in_channels": {"video": 96, "video_cond": 96, "image": 128}}),
}


def test_every_golden_edge_row_is_covered(golden_json):
    rows = {
        row["case"].removeprefix("config: ")
        for row in golden_json("edge_cases.json")
        if "config: " in row["case"]
    }
    assert rows - EDGE_ROWS.keys() == {"euler sampler"}


@pytest.mark.parametrize("row", EDGE_ROWS)
def test_golden_edge_row(row, native, golden_json):
    verdicts = {case["case"]: case["reference"] for case in golden_json("edge_cases.json")}
    changes, dit_changes = EDGE_ROWS[row]
    raw = {**native, **changes, "dit_config": {**native["dit_config"], **dit_changes}}
    if verdicts[f"config: {row}"] == "accepted":
        assert parse_policy_config(raw).transformer.streams[:2] == ("video", "video_cond")
    else:
        with pytest.raises(CheckpointError, match="policy config"):
            parse_policy_config(raw)


def test_euler_is_supported(native):
    assert parse(native, sampler="euler").sampler == "euler"


def test_defaults_are_the_released_model():
    config = parse_policy_config(DROID)
    assert config.transformer == droid_config("full").transformer
    assert config.transformer.in_channels == {
        "video": 96,
        "video_cond": 96,
        "action_prediction_droid": 8,
        "action_prediction_droid_cond": 8,
    }
    assert (config.sampler, config.num_inference_steps, config.sampler_shift) == ("cosmos_unipc", 4, 1.0)
    assert (config.guidance_scale, config.guidance_scale_action) == (1.0, None)
    assert config.cameras == ("wrist", "left", "right")


def test_nulls_fall_back(native):
    keys = ("sampler", "num_inference_steps", "guidance_scale", "guidance_scale_action", "sampler_shift")
    config = parse(native, **dict.fromkeys(keys))
    assert (config.sampler, config.num_inference_steps, config.sampler_shift) == ("cosmos_unipc", 4, 1.0)
    assert (config.guidance_scale, config.guidance_scale_action) == (1.0, None)


def test_training_keys_are_ignored(native):
    assert parse(native, train_steps=5, optimizer_lr=1e-4, augment=True) == parse(native)


def test_normalization_is_read(native):
    stats = {"q01": [0] * 8, "q99": [1] * 8}
    assert parse(native, state_normalization=stats).state_normalization.q99 == (1.0,) * 8


def test_config_without_single_frame_encode_carries_a_note(native):
    assert "single frame" in parse(native, single_frame_encode=False).notes[0]


@pytest.mark.parametrize("key", DROID)
def test_required_keys(key):
    with pytest.raises(CheckpointError, match=key):
        parse_policy_config({name: value for name, value in DROID.items() if name != key})


@pytest.mark.parametrize(
    "change",
    [
        {"action_modality": "9droid"},
        {"action_modality": "video"},
        {"action_dim": 0},
        {"action_dim": "8"},
        {"chunk_size": 6},
        {"camera_layout": "mosaic"},
        {"camera_keys": ["a", "b"]},
        {"camera_layout": "grid", "camera_keys": []},
        {"camera_layout": "side_by_side", "camera_keys": ["images.a", "a"]},
        {"canvas_hw": [160, 200]},
        {"canvas_hw": [128, 192]},
        {"camera_layout": "droid", "camera_keys": ["a", "b", "c"]},
        {"fps": 0},
        {"fps": float("nan")},
        {"action_scale": float("inf")},
        {"gripper_flip_dims": [8]},
        {"gripper_flip_dims": [-1, 7]},
        {"absolute_action_dims": [-9]},
        {"action_normalization": {"q01": [0.0], "q99": [1.0]}},
        {"normalization_clip": -1},
        {"conditioning_channels": 16},
        {"torch_dtype": "float16"},
        {"quantization": "int8"},
        {"num_inference_steps": 0},
        {"guidance_scale": -0.5},
        {"guidance_scale_action": -1},
        {"sampler_shift": 0},
        {"inference_seed": -1},
    ],
    ids=str,
)
def test_rule_of_section_3(native, change):
    with pytest.raises(CheckpointError, match=next(reversed(change)).split("_")[0]):
        parse(native, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"axes_dim": [5, 5, 3, 3]},
        {"axes_dim": [8, 8]},
        {"sequence": {"x_video": "video_cond"}},
        {"mlp_ratio": 0},
        {"depth_single_blocks": 0},
        {"in_channels": {"video": 96, "video_cond": 48}},
        {"in_channels": {"video": 16, "video_cond": 96}},
    ],
    ids=str,
)
def test_rule_of_dit_config(native, change):
    with pytest.raises(CheckpointError, match="dit_config"):
        parse_dit(native, **change)


def test_vector_input_may_be_absent(native):
    assert parse_dit(native, vec_in_dim=None).transformer.vec_in_dim is None
