"""Files that are written: they decode to what was asked, carry their origin, and never hide faults."""

from __future__ import annotations

import io
import wave
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel.errors import ConfigError, OutputError
from pipelines.ltx2 import media
from pipelines.ltx2.outputs import MEANINGLESS, video_files
from pipelines.ltx2.request import VideoResult

av = pytest.importorskip("av")

F, H, W = 9, 64, 96
RATE = 24000


def result(*, videos: int = 1, fps: float = 24.0) -> VideoResult:
    """A bright square that moves over a gradient, and a 440 Hz tone."""
    frames = torch.linspace(0.1, 0.6, W).expand(videos, F, 3, H, W).clone()
    for number in range(F):
        frames[:, number, :, 20:40, 5 * number : 5 * number + 20] = torch.tensor([0.9, 0.2, 0.4])[
            :, None, None
        ]
    seconds = torch.arange(int(RATE * F / fps)) / RATE
    tone = 0.5 * torch.sin(2 * torch.pi * 440 * seconds)
    return VideoResult(
        frames=frames,
        waveform=tone.expand(videos, 2, -1).clone(),
        fps=fps,
        sampling_rate=RATE,
        prompt="a square, 4:3 = ok; été 猫",
        seed=11,
        outputs={},
        notes=("cut short",),
    )


def files(made: VideoResult, **options: Any) -> dict[str, bytes]:
    return video_files(
        made,
        **{
            "save_as": "mp4",
            "model": "ltx2",
            "config_hash": "abc123",
            "outputs_mean_nothing": True,
            **options,
        },
    )


@pytest.mark.parametrize("fps", [24.0, 12.5, 30000 / 1001])
def test_mp4_decodes_to_the_frames_and_the_sound(fps: float) -> None:
    made = result(fps=fps)
    content = files(made)["video.mp4"]
    with av.open(io.BytesIO(content)) as container:
        video, sound = container.streams.video[0], container.streams.audio[0]
        assert float(video.average_rate) == pytest.approx(fps, rel=1e-6)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video)])
        container.seek(0)
        samples = np.concatenate([piece.to_ndarray() for piece in container.decode(sound)], axis=1)
    assert frames.shape == (F, H, W, 3)
    expected = (made.frames[0].permute(0, 2, 3, 1) * 255).numpy()
    assert np.abs(frames - expected).mean() < 3
    assert samples.shape[0] == 2
    length = made.waveform.shape[-1]
    assert length <= samples.shape[1] < length + 3 * 1024  # whole AAC frames, and the encoder's delay
    assert (sound.rate, sound.layout.name) == (RATE, "stereo")
    assert 0.3 < np.abs(samples[:, 2048:4096]).max() < 0.7


def test_mp4_says_where_it_is_from() -> None:
    with av.open(io.BytesIO(files(result())["video.mp4"])) as container:
        tags = container.metadata
    assert tags["seed"] == "11"
    assert (tags["model"], tags["config_hash"]) == ("ltx2", "abc123")
    assert tags["title"] == "a square, 4:3 = ok; été 猫"
    assert tags["comment"] == f"{MEANINGLESS} cut short"


@pytest.mark.parametrize("save_as", ["mp4", "both"])
def test_equal_results_give_equal_bytes(save_as: str) -> None:
    assert files(result(), save_as=save_as) == files(result(), save_as=save_as)


def test_what_memory_held_before_does_not_show_in_the_bytes() -> None:
    """Soft shapes that change: what x264 plans ahead for."""
    coarse = torch.rand(1, 3, 13, H // 8, W // 8, generator=torch.Generator().manual_seed(0)) * 0.7 + 0.15
    soft = torch.nn.functional.interpolate(coarse, size=(25, H, W), mode="trilinear")
    made = replace(result(), frames=soft.transpose(1, 2))
    written = set()
    for number in range(12):
        before = [torch.full((1000 * size,), number, dtype=torch.uint8) for size in range(1, 200, 5)]
        del before
        written.add(files(made)["video.mp4"])
    assert len(written) == 1


def test_frames_are_exact() -> None:
    made = result()
    written = files(made, save_as="frames")
    assert list(written) == [*(f"frame_{number:04}.png" for number in range(F)), "sound.wav"]
    image = Image.open(io.BytesIO(written["frame_0003.png"]))
    expected = (made.frames[0, 3].permute(1, 2, 0) * 255).round().numpy().astype(np.uint8)
    assert np.array_equal(np.asarray(image), expected)
    with wave.open(io.BytesIO(written["sound.wav"])) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (2, 2, RATE)
        pcm = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2").reshape(-1, 2).T
    assert np.array_equal(pcm, np.rint(made.waveform[0].numpy() * 32767).astype(np.int16))


def test_a_frame_tells_where_it_came_from() -> None:
    """By the keywords of PNG, as images of FLUX.2 do."""
    written = files(result(), save_as="frames")
    text = {
        "Software": "samebit",
        "prompt": "a square, 4:3 = ok; été 猫",
        "seed": "11",
        "model": "ltx2",
        "config_hash": "abc123",
        "Comment": f"{MEANINGLESS} cut short",
    }
    assert Image.open(io.BytesIO(written["frame_0003.png"])).text == text
    plain = files(replace(result(), notes=()), save_as="frames", outputs_mean_nothing=False)
    del text["Comment"]
    assert Image.open(io.BytesIO(plain["frame_0000.png"])).text == text


def test_several_videos_are_numbered() -> None:
    assert list(files(result(videos=2))) == ["video_0.mp4", "video_1.mp4"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_errors(value: float) -> None:
    made = result()
    made.frames[0, 4, 1, 2, 3] = value
    with pytest.raises(OutputError, match=r"frame 4 of video: 1 of \d+ values are not finite"):
        files(made)
    made = result()
    made.waveform[0, 1, 7:9] = value
    with pytest.raises(OutputError, match=r"sound of video: 2 of \d+ values are not finite"):
        files(made)


def test_odd_sizes_are_refused_as_video() -> None:
    made = result()
    odd = replace(made, frames=made.frames[..., :5, :7])
    with pytest.raises(OutputError, match="7x5"):
        files(odd)
    image = Image.open(io.BytesIO(files(odd, save_as="frames")["frame_0000.png"]))
    assert image.size == (7, 5)


def test_a_missing_encoder_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.save_as=mp4 needs PyAV.*av>=14,<19"):
        media.require_av("model.save_as=mp4")
