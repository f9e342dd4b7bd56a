"""Bodies as calls: the envelope, the bare observation, RoboLab's keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tasks.serving.calls import MAX_ID, call_from
from tasks.serving.codec import Limits
from tasks.serving.errors import InvalidRequestError
from tasks.serving.policy import Parameters
from tasks.serving.robolab import from_robolab, is_robolab

LIMITS = Limits()


def test_envelope() -> None:
    call = call_from(
        {
            "id": 7,
            "input": {"task": "lift", "observation": {"images": {}, "state": [1]}},
            "parameters": {
                "num_inference_steps": 2,
                "seed": [5],
                "guidance_scale": np.float32(1.5),
                "output_format": "list",
            },
            "runtime": {"deadline_ms": 20, "response_format": "raw"},
        },
        LIMITS,
    )
    assert call.request_id == "7"
    assert call.observation == {"task": "lift", "images": {}, "state": [1]}
    assert call.parameters == Parameters(num_inference_steps=2, seed=5, guidance_scale=1.5)
    assert (call.runtime.output_format, call.runtime.deadline_ms) == ("list", 20)
    assert call.runtime.response_format == "raw"


def test_a_body_without_input_is_the_observation() -> None:
    call = call_from({"state": [1], "prompt": "go", "id": "of the robot", "parameters": {"seed": 3}}, LIMITS)
    assert call.observation == {"state": [1], "prompt": "go", "id": "of the robot"}
    assert call.parameters.seed == 3
    assert call.request_id != "of the robot"


def test_new_ids_differ() -> None:
    assert call_from({}, LIMITS).request_id != call_from({}, LIMITS).request_id


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"parameters": {"num_inference_steps": 0}}, "num_inference_steps"),
        ({"parameters": {"num_inference_steps": True}}, "num_inference_steps"),
        ({"parameters": {"num_inference_steps": 2.0}}, "num_inference_steps"),
        ({"parameters": {"seed": -1}}, "seed"),
        ({"parameters": {"seed": [1, 2]}}, "2 elements"),
        ({"parameters": {"guidance_scale": -0.5}}, "guidance_scale"),
        ({"parameters": {"guidance_scale": True}}, "guidance_scale"),
        ({"parameters": {"guidence_scale": 1.0}}, "guidence_scale"),
        ({"parameters": [1]}, "list instead of a map"),
        ({"runtime": {"deadline_ms": 0}}, "deadline_ms"),
        ({"runtime": {"output_format": "pickle"}}, "output_format"),
        ({"runtime": {"prefix_cache": False}}, "prefix_cache"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * (MAX_ID + 1)}, "request_id"),
        ({"request_id": {"a": 1}}, "request_id"),
        ({"input": [{}, {}]}, "2 elements"),
        ({"input": {}, "state": [1]}, "state: stands beside `input`"),
        ({"input": "go"}, "str instead of a map"),
        ({"input": {"state": [1], "observation": {"state": [2]}}}, "send one"),
    ],
)
def test_refusals(body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call_from(body, LIMITS)
    assert told in str(caught.value)


def robolab(**changes: Any) -> dict[str, Any]:
    parts = {
        "joint_position": np.arange(7, dtype=np.float32),
        "gripper_position": 0.25,
        "image": np.zeros((540, 640, 3), np.uint8),
        **changes,
    }
    return {f"observation/{key}": value for key, value in parts.items() if value is not None} | {
        "prompt": "go"
    }


def test_robolab_composite() -> None:
    body = robolab()
    observation = from_robolab(body)
    assert is_robolab(body)
    assert not is_robolab(observation)
    assert observation["state"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0.25]
    assert list(observation["images"]) == ["composite"]
    assert observation["prompt"] == "go"


def test_robolab_history_and_three_views() -> None:
    view = np.zeros((360, 640, 3), np.uint8)
    views = dict.fromkeys(("wrist_image_left", "exterior_image_1_left", "exterior_image_2_left"), view)
    history = np.stack([np.zeros(7), np.ones(7)])
    observation = from_robolab(
        robolab(image=None, joint_position=history, gripper_position=np.array([0.5]), **views)
    )
    assert observation["state"].tolist() == [1] * 7 + [0.5]
    assert observation["images"] == views


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"joint_position": None}, "observation/joint_position: missing"),
        ({"gripper_position": None}, "observation/gripper_position: missing"),
        ({"gripper_position": [0.1, 0.2]}, "one number"),
        ({"joint_position": np.zeros((0, 7))}, "one number"),
        ({"joint_position": np.zeros((1, 2, 7))}, "one number"),
        ({"joint_position": "text"}, "observation/joint_position"),
    ],
)
def test_robolab_refusals(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_robolab(robolab(**changes))
    assert told in str(caught.value)
