"""The dialect of RoboLab's clients: `observation/...` keys in (spec section 14.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.errors import ObservationError
from pipelines.flux3_action.arrays import real_array
from tasks.serving.errors import InvalidRequestError

_PREFIX = "observation/"
_IMAGE = "image"
_CAMERAS = ("wrist_image_left", "exterior_image_1_left", "exterior_image_2_left")


def is_robolab(body: Mapping[str, Any]) -> bool:
    return any(key.startswith(_PREFIX) for key in body)


def from_robolab(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same observation with the keys that `Policy.prepare` takes; other keys stay.

    `observation/image` is the 540 x 640 composite of all cameras. `observation/joint_position` is (J,), or
    (T, J), of which the last row counts; `observation/gripper_position` a number or an array of one.
    Raises: InvalidRequestError naming the key.
    """
    parts = {key.removeprefix(_PREFIX): value for key, value in body.items() if key.startswith(_PREFIX)}
    rest = {key: value for key, value in body.items() if not key.startswith(_PREFIX)}
    images = {camera: parts[camera] for camera in _CAMERAS if camera in parts}
    if _IMAGE in parts:
        images = {"composite": parts[_IMAGE]}
    joints = _numbers(parts, "joint_position")
    if joints.ndim == 2 and len(joints):
        joints = joints[-1]
    gripper = _numbers(parts, "gripper_position")
    if joints.ndim != 1 or gripper.size != 1:
        raise InvalidRequestError(
            f"{_PREFIX}joint_position: shape {joints.shape}, {_PREFIX}gripper_position: shape "
            f"{gripper.shape}; send (J,) or (T, J), and one number"
        )
    return rest | {"images": images, "state": np.concatenate([joints, gripper.reshape(1)])}


def _numbers(parts: Mapping[str, Any], key: str) -> npt.NDArray[Any]:
    if parts.get(key) is None:
        raise InvalidRequestError(f"{_PREFIX}{key}: missing")
    try:
        return real_array(parts[key], name=_PREFIX + key, what="numbers")
    except ObservationError as error:
        raise InvalidRequestError(str(error)) from None
