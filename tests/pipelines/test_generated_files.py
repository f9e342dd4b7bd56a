"""One run of each generating model: files that say where they are from, and the result beside them."""

from __future__ import annotations

import hashlib
import io
import json
import wave
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tasks.run
from tasks.config import compose

SMALL = (
    "accel=eager",
    "device=cpu",
    "size=tiny",
    "logger=plain",
    "task.repeats=1",
    "seed=5",
    "prompt=a kite",
)


def run(folder: Path, *overrides: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Result and other files of `python run.py OVERRIDES`; the digests of the files are checked."""
    tasks.run.main(compose(*SMALL, *overrides), folder=folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    result = json.loads(files.pop("result.json"))
    assert result["files"] == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert (result["status"], result["verdict"]) == ("ok", "equal")
    return result, files


def pngs(files: dict[str, bytes]) -> dict[str, Image.Image]:
    return {name: Image.open(io.BytesIO(data)) for name, data in files.items() if name.endswith("png")}


def test_images(tmp_path: Path) -> None:
    sizes = ("model.height=32", "model.width=48", "model.steps=1", "model.images_per_prompt=2")
    result, files = run(tmp_path / "out", "model=flux2_klein", *sizes)
    assert set(files) == {"image_0.png", "image_1.png"}
    for image in pngs(files).values():
        assert image.size == (48, 32)
        assert (image.info["seed"], image.info["prompt"]) == ("5", "a kite")
        assert image.info["config_hash"] == result["config_hash"]
    assert {
        "text_encoding.prompt_embeds",
        "image_encoding.reference_tokens",
        "denoising.latents",
        "vae.images",
    } <= result["digests"].keys()


VIDEO = ("model=ltx2", "model.height=64", "model.width=96", "model.frames=9", "model.steps=2")


def test_frames_and_sound(tmp_path: Path) -> None:
    result, files = run(tmp_path / "out", *VIDEO, "model.save_as=frames")
    images = pngs(files)
    assert set(images) == {f"frame_{number:04}.png" for number in range(9)}
    assert {image.size for image in images.values()} == {(96, 64)}
    assert {image.info["config_hash"] for image in images.values()} == {result["config_hash"]}
    with wave.open(io.BytesIO(files["sound.wav"])) as sound:
        assert (sound.getnchannels(), sound.getframerate()) == (2, 24000)
        assert sound.getnframes() > 0
    assert {
        "text_encoding.prompt_states",
        "connectors.text",
        "latent_preparation.noise",
        "denoising.latents",
        "vae.frames",
        "audio_vae.spectrogram",
        "vocoder.waveform",
    } <= result["digests"].keys()


def test_video_with_sound(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    result, files = run(tmp_path / "out", *VIDEO)
    assert set(files) == {"video.mp4"}
    with av.open(io.BytesIO(files["video.mp4"])) as container:
        assert container.metadata["config_hash"] == result["config_hash"]
        assert container.metadata["seed"] == "5"
        assert len(list(container.decode(container.streams.video[0]))) == 9
        assert [stream.type for stream in container.streams] == ["video", "audio"]
