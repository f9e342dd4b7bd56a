"""The architecture of a video encoder, read off its checkpoint."""

from __future__ import annotations

import re

from accel.errors import CheckpointError
from pipelines.checkpoint import Checkpoint
from pipelines.flux3_action.video_vae import VideoEncoderConfig

_FEATURE_BLOCK = re.compile(r"model\.encoder\.features\.(\d+)\.(?:(\d+)\.)?attn\.rope\.inv_freq")


def read_video_encoder_config(checkpoint: Checkpoint) -> VideoEncoderConfig:
    """Widths, depths, heads and temporal stages from tensor names and shapes (spec section 6.1).

    A stage is a list of blocks; a block that stands alone belongs to the temporal merge of the stage
    before it. What this reads wrong, strict loading refuses by name.
    Raises: CheckpointError if the tensors are not those of such an encoder.
    """
    shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
    blocks = [match for match in map(_FEATURE_BLOCK.fullmatch, shapes) if match]
    stages = sorted({int(block[1]) for block in blocks if block[2]})
    merges = {int(block[1]) for block in blocks if not block[2]}
    try:
        embed_dim, _, *patch = shapes["model.encoder.patch_embed.proj.weight"]
        (z_dim,) = shapes["model.z_normalizer.running_mean"]
        widths = [shapes[f"model.encoder.features.{stage}.0.norm1.weight"][0] for stage in stages]
        heads = [
            # inv_freq is (4, head_dim / 8)
            width // (8 * shapes[f"model.encoder.features.{stage}.0.attn.rope.inv_freq"][1])
            for stage, width in zip(stages, widths, strict=True)
        ]
        frames, rows, columns = patch
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: not a FLUX 3 video VAE: {error} missing or of another shape. "
            "Use the file that the package names."
        ) from error
    ends = [*stages[1:], max(merges | set(stages), default=0) + 1]
    return VideoEncoderConfig(
        embed_dim=embed_dim,
        patch_size=(frames, rows, columns),
        depths=tuple(sum(int(block[1]) == stage for block in blocks) for stage in stages),
        num_heads=tuple(heads),
        temporal=tuple(
            any(start < merge < end for merge in merges) for start, end in zip(stages, ends, strict=True)
        ),
        z_dim=z_dim,
    )
