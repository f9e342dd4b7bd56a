"""The picture that a video starts with."""

from __future__ import annotations

import numpy as np
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor


def first_frame_pixels(image: Image.Image, *, height: int, width: int, crf: int, vae_ratio: int) -> Tensor:
    """RGB of any size -> fp32 (1, 3, height, width) in [-1, 1], on the CPU.

    crf: H.264 quality to compress with first, 0 for not at all. vae_ratio: pixels a latent, per axis.
    """
    if crf:
        image = Image.fromarray(apply_image_conditioning_crf(np.array(image), crf))
    processor = VideoProcessor(vae_scale_factor=vae_ratio, resample="bilinear")
    pixels: Tensor = processor.preprocess(image, height=height, width=width)
    return pixels
