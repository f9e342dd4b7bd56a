"""Observations from files: a recorded episode, an .npz, or loose image files.

Each loader returns the raw mapping that `parse_observation` checks.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from accel.errors import ObservationError
from pipelines.flux3_action.images import open_image
from pipelines.flux3_action.settings import ObservationSource

_NOT_CAMERAS = ("state", "observation.state", "prompt", "task")


class _Frame(msgspec.Struct):
    state: list[float]
    images: dict[str, str]


class _Episode(msgspec.Struct):
    frames: list[_Frame]
    prompt: str = ""


def load_observation(source: ObservationSource) -> dict[str, Any]:
    """What the configuration names. Raises: ObservationError; see the loaders below."""
    if source.episode is not None:
        return load_episode_frame(source.episode, source.frame)
    if source.npz is not None:
        return load_npz(source.npz)
    assert source.images is not None
    assert source.state is not None
    return load_image_files(source.images, source.state)


def load_episode_frame(folder: str | Path, frame: int) -> dict[str, Any]:
    """One frame of a recorded episode.

    folder: holds `episode.json` with `prompt` and `frames`, each `{state: [A], images: {camera: file}}`,
        and the image files.
    Raises: ObservationError if the folder, the frame or an image is missing or damaged.
    """
    path = Path(folder) / "episode.json"
    try:
        episode = msgspec.json.decode(path.read_bytes(), type=_Episode)
    except OSError as error:
        raise ObservationError(f"{path}: can't be read ({error.strerror}); name a recorded episode") from None
    except msgspec.DecodeError as error:
        raise ObservationError(f"{path}: {error}") from None
    if not 0 <= frame < len(episode.frames):
        raise ObservationError(f"{path}: no frame {frame}; it has frames 0 to {len(episode.frames) - 1}")
    found = episode.frames[frame]
    files = {camera: Path(folder) / name for camera, name in found.images.items()}
    return load_image_files(files, found.state, prompt=episode.prompt)


def load_image_files(
    images: Mapping[str, str | Path], state: Sequence[float], *, prompt: str = ""
) -> dict[str, Any]:
    """One image file per camera. Orientation, colour order and depth are taken from the files.

    Raises: ObservationError naming the camera if a file is missing or no image.
    """
    frames = {camera: open_image(path, camera=camera) for camera, path in images.items()}
    return {"images": frames, "state": list(state), "prompt": prompt}


def load_npz(path: str | Path) -> dict[str, Any]:
    """An archive with arrays `state`, optionally `prompt` (a text), and one array per camera.

    Raises: ObservationError if it can't be read or holds Python objects, which are never unpickled.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise ObservationError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error):
        raise ObservationError(
            f"{path}: no .npz archive of plain arrays, or a damaged one. Write one with numpy.savez."
        ) from None
    texts = {name: arrays[name].tolist() for name in ("prompt", "task") if name in arrays}
    states = {name: arrays[name] for name in ("state", "observation.state") if name in arrays}
    images = {name: array for name, array in arrays.items() if name not in _NOT_CAMERAS}
    return {"images": images, **states, **texts}
