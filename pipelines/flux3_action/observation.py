"""What a robot client sends -> a checked observation (spec sections 4, 5 and 14.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.errors import ObservationError
from pipelines.flux3_action.arrays import real_array
from pipelines.flux3_action.canvas import COMPOSITE
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.flux3_action.images import to_unit_image
from pipelines.flux3_action.policy_config import PolicyConfig

RawObservation = Mapping[str, Any]
"""Keys `images` (camera -> image) or `observation.images.<camera>`, `state`, and `prompt` or `task`."""

PREFIXES = ("observation.images.", "images.")
ALIASES = {
    "wrist_image_left": "wrist",
    "exterior_image_1_left": "left",
    "exterior_image_2_left": "right",
}
"""Camera names of the DROID data set -> names of its policy."""


@dataclass(frozen=True)
class Observation:
    """One moment of a robot.

    images: camera -> float32 (3, H, W) in [0, 1]. state: float32 (A,), dataset units. prompt: the caption.
    All tensors are on the CPU.
    """

    images: Mapping[str, Tensor]
    state: Tensor
    prompt: str


def parse_observation(
    raw: RawObservation, config: PolicyConfig, image_format: ImageFormat | None = None
) -> Observation:
    """Check everything that the policy needs; cameras that it does not know are ignored.

    image_format: what image arrays mean; default is RGB, HWC, integers 0..255 and floats 0..1.
    Raises: ObservationError naming the camera, `state` or `prompt`.
    """
    if not isinstance(raw, Mapping):
        raise ObservationError(f"an observation is a mapping, not {type(raw).__name__}")
    image_format = image_format or ImageFormat()
    images = {
        camera: to_unit_image(value, camera=camera, image_format=image_format)
        for camera, value in _frames(raw, config).items()
    }
    return Observation(images, _state(raw, config.action_dim), _prompt(raw))


def _frames(raw: RawObservation, config: PolicyConfig) -> dict[str, Any]:
    """The images that make the canvas: the policy's cameras in layout order, or the composite."""
    mapping = raw.get("images", {})
    if not isinstance(mapping, Mapping):
        raise ObservationError(f"images: a mapping from camera to image, not {type(mapping).__name__}")
    flat = {key: value for key, value in raw.items() if isinstance(key, str) and key.startswith(PREFIXES)}
    frames = _by_camera(flat, config.cameras) | _by_camera(mapping, config.cameras)
    wanted = (COMPOSITE,) if COMPOSITE in frames else config.cameras
    missing = [camera for camera in wanted if camera not in frames]
    if missing:
        raise ObservationError(
            f"images: no camera {', '.join(missing)}; this policy needs {', '.join(config.cameras)}, "
            f"the observation has {', '.join(frames) or 'none'}"
        )
    return {camera: frames[camera] for camera in wanted}


def _by_camera(images: Mapping[Any, Any], cameras: tuple[str, ...]) -> dict[str, Any]:
    """Key the images by the policy's own camera names; cameras that it does not know keep theirs."""
    frames: dict[str, Any] = {}
    for key, value in images.items():
        name = str(key)
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        camera = name if name in cameras else ALIASES.get(name, name)
        if camera in frames and camera in (*cameras, COMPOSITE):
            raise ObservationError(f"images: two images for camera '{camera}', the second under '{key}'")
        frames[camera] = value
    return frames


def _state(raw: RawObservation, width: int) -> Tensor:
    """float32 (A,) from anything that holds A finite numbers."""
    value = _first_given(raw, "state", "observation.state")
    if value is None:
        raise ObservationError(f"state: missing; send {width} numbers")
    array = real_array(value, name="state", what=f"{width} numbers")
    if array.size != width:
        raise ObservationError(f"state: shape {array.shape} holds {array.size} values; send {width} numbers")
    with np.errstate(over="ignore"):  # an overflow is reported below
        state = torch.from_numpy(np.array(array, dtype=np.float32).reshape(width))
    if not state.isfinite().all():
        bad = (~state.isfinite()).nonzero().flatten().tolist()
        raise ObservationError(f"state: NaN, infinite or beyond float32 in channel {bad}")
    return state


def _prompt(raw: RawObservation) -> str:
    """The caption; `task` is a synonym, absence the empty caption, and a list of one is unwrapped."""
    value = _first_given(raw, "prompt", "task")
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ObservationError(f"prompt: {len(value)} captions; send one")
        value = value[0]
    if not isinstance(value, str):
        raise ObservationError(f"prompt: {type(value).__name__} instead of a text")
    return str(value)


def _first_given(raw: RawObservation, *keys: str) -> Any:
    """The value of the first key that has one; `None` counts as absent."""
    return next((raw[key] for key in keys if raw.get(key) is not None), None)
