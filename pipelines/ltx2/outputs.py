"""The files that videos become: video.mp4, or frames as PNG with sound.wav."""

from __future__ import annotations

from torch import Tensor

from pipelines.ltx2.media import Samples, mp4, wav
from pipelines.ltx2.request import VideoResult
from pipelines.ltx2.settings import SaveAs
from pipelines.pixel_files import Pixels, eight_bit, png, require_finite

MEANINGLESS = "Synthetic weights: this video means nothing."


def video_files(
    result: VideoResult, *, save_as: SaveAs, model: str, config_hash: str, outputs_mean_nothing: bool
) -> dict[str, bytes]:
    """File name -> contents, all of them encoded before any is written.

    model, config_hash: of the run, written into every video and frame beside prompt and seed.
    outputs_mean_nothing: synthetic weights.
    Raises: OutputError naming the first frame or sound with values that are not finite.
    """
    comment = " ".join((*((MEANINGLESS,) if outputs_mean_nothing else ()), *result.notes))
    origin = {"seed": str(result.seed), "model": model, "config_hash": config_hash}
    tags = {"title": result.prompt, "comment": comment, "software": "samebit", **origin}
    text = {"Software": "samebit", "prompt": result.prompt, **origin}
    if comment:
        text["Comment"] = comment
    files = {}
    for index in range(len(result.frames)):
        suffix = "" if len(result.frames) == 1 else f"_{index}"
        pixels = _pixels(result.frames[index], suffix)
        samples = _samples(result.waveform[index], suffix)
        if save_as != "frames":
            files[f"video{suffix}.mp4"] = mp4(
                pixels, samples, fps=result.fps, sampling_rate=result.sampling_rate, metadata=tags
            )
        if save_as != "mp4":
            for number, frame in enumerate(pixels):
                files[f"frame{suffix}_{number:04}.png"] = png(frame, metadata=text)
            files[f"sound{suffix}.wav"] = wav(samples, sampling_rate=result.sampling_rate)
    return files


def _pixels(frames: Tensor, suffix: str) -> Pixels:
    """(F, 3, H, W) in [0, 1] -> (F, H, W, 3)."""
    for number, frame in enumerate(frames):
        require_finite(f"frame {number} of video{suffix}", frame)
    return eight_bit(frames)


def _samples(waveform: Tensor, suffix: str) -> Samples:
    """(channels, samples); what lies outside [-1, 1] is clipped."""
    require_finite(f"sound of video{suffix}", waveform)
    samples: Samples = waveform.float().clamp(-1, 1).numpy()
    return samples
