"""Device memory that requests hold beside the weights, told before anything is allocated.

It counts what is large and known: keys and values of the text (see `text_keys`). Activations are left to
the margin of `pipelines.device_memory`.
"""

from __future__ import annotations

from accel.policy import AccelPolicy
from pipelines.ltx2.guidance import UNGUIDED, Guidance
from pipelines.ltx2.request import VideoRequest
from pipelines.ltx2.text_keys import has_positive_keys
from pipelines.ltx2.transformer_pass import Transformer


def text_memory(
    request: VideoRequest, policy: AccelPolicy, transformer: Transformer, *, tokens: int
) -> dict[str, int]:
    """Bytes by name; empty where every step projects the text anew.

    Keys of one loop are held at a time. A graph has a copy of its own among its fixed inputs, which stays:
    one for each loop that the policy captures, for one size of videos. Where every pass is a graph of its own
    (`attention_breaks.DenoisingByPass`) both passes of the prompt alone have one, of which one is counted.
    transformer: may be without memory, on the meta device. tokens: of every prompt.
    """
    row = _row_bytes(transformer, tokens)
    if not row:
        return {}
    loops = {"denoising": request.guidance}
    if request.refinement is not None:
        loops["refinement"] = UNGUIDED
    held = {stage: row * _rows(transformer, request, guidance) for stage, guidance in loops.items()}
    copied = sum(held[stage] for stage in loops if policy.for_stage(stage).enable_cuda_graph)
    return {"text keys": max(held.values()), "text keys in graphs": copied}


def _row_bytes(transformer: Transformer, tokens: int) -> int:
    """Bytes of the keys and values of one row of text in all blocks."""
    blocks = [block for block in transformer.transformer_blocks if not block.cross_attn_adaln]
    widths: list[int] = [
        attn.to_k.out_features for block in blocks for attn in (block.attn2, block.audio_attn2)
    ]
    itemsize: int = transformer.dtype.itemsize
    return 2 * tokens * sum(widths) * itemsize


def _rows(transformer: Transformer, request: VideoRequest, guidance: Guidance) -> int:
    """Rows of text that get keys: of the prompt, the negative prompt, and the prompt alone."""
    return request.videos * (1 + guidance.text + has_positive_keys(guidance, transformer))
