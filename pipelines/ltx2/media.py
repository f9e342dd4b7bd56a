"""Frames and sound as MP4 and WAV. Equal inputs give equal bytes."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from accel.errors import ConfigError, OutputError
from pipelines.pixel_files import Pixels

Samples = npt.NDArray[np.float32]
"""(channels, samples) in [-1, 1]."""

_CRF = "17"  # H.264 quality: hardly told from the frames themselves
# Without `mbtree`: x264's AVX-512 code for it lets what memory held before show in the bytes.
_H264 = {"crf": _CRF, "mbtree": "0"}
_THREADS = 4  # the encoder's bytes depend on their number, so it is not the machine's
_SOUND_BITS_PER_SECOND = 192_000
_BT709, _LIMITED = 1, 1


def require_av(reason: str) -> None:
    """Raises: ConfigError saying what to install if PyAV, which `reason` needs, is missing."""
    if find_spec("av") is None:
        raise ConfigError(f"{reason} needs PyAV, which is not installed: pip install 'av>=14,<19'.")


def mp4(
    pixels: Pixels, samples: Samples, *, fps: float, sampling_rate: int, metadata: Mapping[str, str]
) -> bytes:
    """H.264 and AAC. pixels: (frames, height, width, 3). metadata: tags of the file.

    Raises: OutputError for frames of odd width or height, which H.264 can't hold without changing them.
    """
    import av  # an extra

    _, height, width, _ = pixels.shape
    if height % 2 or width % 2:
        raise OutputError(f"frames of {width}x{height} pixels can't be H.264, which takes even sizes.")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4", options={"movflags": "+use_metadata_tags"}) as container:
        container.metadata.update(metadata)
        video = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=_H264)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        context = video.codec_context
        context.thread_count = _THREADS
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = _LIMITED
        sound = container.add_stream("aac", rate=sampling_rate, layout=_layout(samples))
        sound.bit_rate = _SOUND_BITS_PER_SECOND
        for frame in pixels:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            container.mux(video.encode(picture.reformat(format="yuv420p", dst_colorspace="ITU709")))
        container.mux(video.encode())
        piece = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples), format="fltp", layout=_layout(samples)
        )
        piece.sample_rate = sampling_rate
        container.mux(sound.encode(piece))
        container.mux(sound.encode())
    return buffer.getvalue()


def wav(samples: Samples, *, sampling_rate: int) -> bytes:
    """16-bit PCM, rounded to nearest."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(len(samples))
        file.setsampwidth(2)
        file.setframerate(sampling_rate)
        file.writeframes(np.rint(samples * 32767).astype("<i2").T.tobytes())
    return buffer.getvalue()


def _layout(samples: Samples) -> str:
    return "stereo" if len(samples) == 2 else "mono"
