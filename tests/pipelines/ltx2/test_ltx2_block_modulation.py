"""Modulation that is summed for all blocks at once has the bits that every block would compute."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from ltx2_harness import ALL_SAME, EAGER, ours, picture, same_outputs, stock, tiny_components
from PIL import Image
from torch import Tensor

import pipelines.pipeline
from accel.graphs.recording import RecordingBackend
from accel.record import Kind
from accel.runner import Runner
from pipelines.ltx2.block_modulation import TableSum, accept_sums, block_arguments
from pipelines.ltx2.request import VideoRequest, video_request
from pipelines.ltx2.settings import Ltx2Settings

STEPS, BLOCKS, PASSES = 2, 2, 3
ROWS = 2


def request(image: Image.Image | None = None) -> VideoRequest:
    """With all guidance there is."""
    choice = Ltx2Settings(height=64, width=64, frames=9, steps=STEPS, image_crf=0)
    return video_request("A red kite", settings=choice, size="tiny", seed=7, image=image)


def tables_of(block: Any) -> dict[str, Tensor]:
    """Argument of a block -> the table that it adds to it."""
    tables = {
        "temb": block.scale_shift_table,
        "temb_audio": block.audio_scale_shift_table,
        "temb_ca_scale_shift": block.video_a2v_cross_attn_scale_shift_table[:4],
        "temb_ca_audio_scale_shift": block.audio_a2v_cross_attn_scale_shift_table[:4],
        "temb_ca_gate": block.video_a2v_cross_attn_scale_shift_table[4:],
        "temb_ca_audio_gate": block.audio_a2v_cross_attn_scale_shift_table[4:],
    }
    if block.cross_attn_adaln:
        tables["temb_prompt"] = block.prompt_scale_shift_table
        tables["temb_prompt_audio"] = block.audio_prompt_scale_shift_table
    return tables


@pytest.mark.parametrize(
    ("tables", "noise"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", ["2.0", "2.3"])
@torch.inference_mode()
def test_every_vector_has_the_bits_and_layout_of_stock(
    variant: str, tables: torch.dtype, noise: torch.dtype
) -> None:
    transformer = copy.deepcopy(tiny_components(variant).transformer).to(tables)
    accept_sums(transformer)
    blocks = transformer.transformer_blocks
    generator = torch.Generator().manual_seed(3)
    shared = {
        name: torch.randn(ROWS, 1, table.numel(), generator=generator).to(noise)
        for name, table in tables_of(blocks[0]).items()
    }
    for block, arguments in zip(blocks, block_arguments(blocks, shared), strict=True):
        assert arguments.keys() == shared.keys()
        for name, table in tables_of(block).items():
            assert isinstance(arguments[name], TableSum)
            expected = LTX2VideoTransformerBlock.get_mod_params(table, shared[name], ROWS)
            for ours_, theirs in zip(
                block.get_mod_params(table, arguments[name], ROWS), expected, strict=True
            ):
                assert torch.equal(ours_, theirs)
                assert (ours_.dtype, ours_.stride()) == (theirs.dtype, theirs.stride())


@pytest.mark.parametrize(("image", "added"), [(None, 0), (picture(), STEPS * PASSES * BLOCKS)])
def test_blocks_add_tables_to_vectors_of_single_tokens_alone(
    image: Image.Image | None, added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    stock_sum = LTX2VideoTransformerBlock.get_mod_params

    def noting(table: Tensor, temb: Tensor, rows: int) -> tuple[Tensor, ...]:
        calls.append(temb.shape[1])
        return stock_sum(table, temb, rows)

    monkeypatch.setattr(LTX2VideoTransformerBlock, "get_mod_params", staticmethod(noting))
    ours(tiny_components()).run(request(image))
    assert len(calls) == added
    assert 1 not in calls


def test_replays_see_tables_that_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.pipeline, "Runner", partial(Runner, backend=RecordingBackend()))
    components = tiny_components()
    components = replace(components, transformer=copy.deepcopy(components.transformer))
    pipeline = ours(components, policy=replace(EAGER, name="graph", enable_cuda_graph=True))
    before = pipeline.run(request()).digests
    for block in components.transformer.transformer_blocks:
        block.scale_shift_table.mul_(1.5)
        block.audio_a2v_cross_attn_scale_shift_table.add_(0.25)
    result = pipeline.run(request())
    assert same_outputs(result, stock(components, request()), components) == ALL_SAME
    assert result.digests != before
    kinds = [outcome.kind for outcome in pipeline.record.stages["denoising"].outcomes]
    assert kinds.count(Kind.CAPTURED) == 1
    assert Kind.EAGER not in kinds
