"""Device memory that requests hold beside the weights, told before anything is allocated.

It counts what is large and known: keys and values of the text (see `text_keys`), rotary tables, encoded
prompts, and the copies of these among the fixed inputs of graphs. All of it is for videos of one size: of
another, tables and graphs are kept beside those of the first. Graphs of single passes
(`attention_breaks.DenoisingByPass`) are counted as one of a whole step. Activations, and what graphs hand
out, are left to the margin of `pipelines.device_memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel.graphs.tree import distinct_tensors
from accel.policy import AccelPolicy
from pipelines.ltx2.guidance import UNGUIDED, Guidance
from pipelines.ltx2.latent_shapes import LatentShape, latent_shape
from pipelines.ltx2.request import VideoRequest
from pipelines.ltx2.text_keys import has_positive_keys
from pipelines.ltx2.transformer_pass import Transformer, clip_tables


def working_memory(
    request: VideoRequest,
    policy: AccelPolicy,
    modules: Mapping[str, Any],
    *,
    tokens: int,
    cached_tokens: int,
) -> dict[str, int]:
    """Bytes by name.

    modules: components by name; may be without memory, on the meta device. tokens: of every prompt.
    cached_tokens: budget of the prompt cache.
    Raises: ConfigError for a clip that is too short for sound.
    """
    transformer = modules["transformer"]
    shape = _first_shape(request, modules)
    loops = {"denoising": (request.guidance, shape)}
    if request.refinement is not None:
        loops["refinement"] = (UNGUIDED, shape.doubled())
    graphed = {stage for stage in (*loops, "connectors") if policy.for_stage(stage).enable_cuda_graph}
    keys = {
        stage: _key_bytes(transformer, request, guidance, tokens) for stage, (guidance, _) in loops.items()
    }
    tables = {stage: _table_bytes(transformer, request, *loop) for stage, loop in loops.items()}
    prompt = _prompt_bytes(modules["text_encoder"], tokens)
    prompts = 1 + request.guidance.text
    return {
        "text keys": max(keys.values()),  # of one loop at a time
        "text keys in graphs": sum(keys[stage] for stage in loops if stage in graphed),
        "rotary tables": sum(tables.values()),
        "rotary tables in graphs": sum(tables[stage] for stage in loops if stage in graphed),
        "encoded prompts": prompt * max(prompts, cached_tokens // tokens),
        "encoded prompts in graphs": prompt * prompts if "connectors" in graphed else 0,
    }


def _first_shape(request: VideoRequest, modules: Mapping[str, Any]) -> LatentShape:
    height, width = request.first_size
    return latent_shape(
        modules["vae"],
        modules["audio_vae"],
        frames=request.frames,
        height=height,
        width=width,
        fps=request.fps,
    )


def _key_bytes(transformer: Transformer, request: VideoRequest, guidance: Guidance, tokens: int) -> int:
    """Keys and values of all blocks; 0 where every step projects the text anew.

    Rows are of the prompt, the negative prompt, and the prompt alone.
    """
    rows = request.videos * (1 + guidance.text + has_positive_keys(guidance, transformer))
    blocks = [block for block in transformer.transformer_blocks if not block.cross_attn_adaln]
    widths: list[int] = [
        attn.to_k.out_features for block in blocks for attn in (block.attn2, block.audio_attn2)
    ]
    itemsize: int = transformer.dtype.itemsize
    return rows * 2 * tokens * sum(widths) * itemsize


def _table_bytes(
    transformer: Transformer, request: VideoRequest, guidance: Guidance, shape: LatentShape
) -> int:
    """Rotary tables of one loop, for one size of videos."""
    rows = request.videos * (1 + guidance.text)
    tables = clip_tables(transformer, shape, fps=request.fps, rows=rows, device=torch.device("meta"))
    return sum(table.nbytes for table in distinct_tensors(tables))


def _prompt_bytes(text_encoder: Any, tokens: int) -> int:
    """A prompt's hidden states and mask."""
    config = text_encoder.config
    channels: int = config.hidden_size * (config.num_hidden_layers + 1)
    itemsize: int = text_encoder.dtype.itemsize
    mask_itemsize: int = torch.int64.itemsize
    return tokens * (channels * itemsize + mask_itemsize)
