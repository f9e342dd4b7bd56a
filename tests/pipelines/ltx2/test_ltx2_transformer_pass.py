"""The hoisted forward has the bits of the library's, whatever is asked of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ltx2_harness import rebuilt, tiny_components
from torch import Tensor

from pipelines.ltx2.block_modulation import accept_sums
from pipelines.ltx2.text_attention import accept_keys
from pipelines.ltx2.text_keys import text_keys
from pipelines.ltx2.transformer_pass import (
    embed_timestep,
    embed_video_timestep,
    project_text,
    rotary_tables,
    transformer_pass,
)

FRAMES, HEIGHT, WIDTH, AUDIO = 3, 2, 4, 9


def inputs(transformer: Any, *, rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random latents and text, a mask with padding, coordinates, timesteps of each row."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    config = transformer.config
    projected = config.use_prompt_embeddings
    mask = torch.ones(rows, 16, dtype=torch.int64)
    mask[0, :5] = 0
    return {
        "hidden_states": draw(rows, FRAMES * HEIGHT * WIDTH, config.in_channels),
        "audio_hidden_states": draw(rows, AUDIO, config.audio_in_channels),
        "encoder_hidden_states": draw(
            rows, 16, config.caption_channels if projected else config.cross_attention_dim
        ),
        "audio_encoder_hidden_states": draw(
            rows, 16, config.caption_channels if projected else config.audio_cross_attention_dim
        ),
        "encoder_attention_mask": mask,
        "video_coords": transformer.rope.prepare_video_coords(
            rows, FRAMES, HEIGHT, WIDTH, torch.device("cpu"), fps=25.0
        ),
        "audio_coords": transformer.audio_rope.prepare_audio_coords(rows, AUDIO, torch.device("cpu")),
        "timestep": torch.full((rows,), 998.3897),
    }


def hoisted(transformer: Any, given: dict[str, Tensor], *, per_token: Tensor | None, **kind: Any) -> Any:
    dtype, timestep = given["hidden_states"].dtype, given["timestep"]
    text = project_text(
        transformer,
        given["encoder_hidden_states"],
        given["audio_encoder_hidden_states"],
        given["encoder_attention_mask"],
    )
    return transformer_pass(
        transformer,
        given["hidden_states"],
        given["audio_hidden_states"],
        text=text_keys(transformer, text),  # the text itself, unless attentions take keys
        rope=rotary_tables(transformer, given["video_coords"], given["audio_coords"]),
        video_time=embed_video_timestep(
            transformer, timestep if per_token is None else per_token, dtype=dtype
        ),
        modulation=embed_timestep(transformer, timestep, dtype=dtype),
        **kind,
    )


def library(transformer: Any, given: dict[str, Tensor], *, per_token: Tensor | None, **kind: Any) -> Any:
    timestep = given["timestep"]
    return transformer(
        **{**given, "timestep": timestep if per_token is None else per_token},
        audio_timestep=timestep,
        sigma=timestep,
        audio_encoder_attention_mask=given["encoder_attention_mask"],
        isolate_modalities=kind.get("isolated", False),
        spatio_temporal_guidance_blocks=list(kind.get("perturbed", ())),
        use_cross_timestep=True,
        return_dict=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "kind", [{}, {"isolated": True}, {"perturbed": (1,)}], ids=["plain", "isolated", "stg"]
)
@pytest.mark.parametrize("hoists", [False, True])
@pytest.mark.parametrize("variant", ["2.0", "2.3"])
@torch.inference_mode()
def test_equals_the_library(
    variant: str, hoists: bool, kind: dict[str, Any], rows: int, dtype: torch.dtype
) -> None:
    stock = rebuilt(tiny_components(variant, dtype).transformer)
    transformer = copy.deepcopy(stock)
    if hoists:
        accept_keys(transformer)
        accept_sums(transformer)
    given = inputs(transformer, rows=rows, dtype=dtype)
    clean_first = torch.ones(rows, FRAMES * HEIGHT * WIDTH)
    clean_first[:, : HEIGHT * WIDTH] = 0
    for per_token in (None, given["timestep"][:, None] * clean_first):
        expected = library(stock, given, per_token=per_token, **kind)
        for ours, theirs in zip(
            hoisted(transformer, given, per_token=per_token, **kind), expected, strict=True
        ):
            assert torch.equal(ours, theirs)


@torch.inference_mode()
def test_each_kind_of_pass_differs() -> None:
    transformer = tiny_components("2.3").transformer
    given = inputs(transformer, rows=1, dtype=torch.float32)
    plain, *others = (
        hoisted(transformer, given, per_token=None, **kind)[0]
        for kind in ({}, {"isolated": True}, {"perturbed": (1,)}, {"perturbed": (0,)})
    )
    for other in others:
        assert not torch.equal(plain, other)


@pytest.mark.parametrize("timestep", [999.3986, 998.3897, 752.0, 937.0])
@torch.inference_mode()
def test_timesteps_reach_the_sinusoids_in_fp32(timestep: float) -> None:
    transformer = tiny_components("2.0", torch.bfloat16).transformer
    seen: list[Tensor] = []
    handles = [
        embedder.emb.time_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for embedder in (transformer.time_embed, transformer.audio_time_embed)
    ]
    try:
        value = torch.tensor([timestep], dtype=torch.float32)
        embed_video_timestep(transformer, value, dtype=torch.bfloat16)
        embed_timestep(transformer, value, dtype=torch.bfloat16)
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 2
    for given in seen:
        assert given.dtype == torch.float32
        assert torch.equal(given, value)
