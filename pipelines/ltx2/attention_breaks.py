"""Graph breaks at attention, for attention that can't be captured (LTX-2 spec section 5)."""

from __future__ import annotations

from typing import Any

from diffusers.models.transformers.transformer_ltx2 import LTX2Attention
from torch import Tensor

from accel.graphs.breaks import graph_break
from accel.region import region
from pipelines.ltx2.denoising import Conditioning, Denoising
from pipelines.ltx2.guidance import Guidance, Velocities
from pipelines.ltx2.latent_shapes import Latents
from pipelines.ltx2.schedule import DenoisingStep, NoiseLevel
from pipelines.ltx2.text_keys import TextKeys
from pipelines.ltx2.transformer_pass import RotaryTables, Text, Transformer


def break_at_attention(transformer: Transformer) -> None:
    """Run every attention of the transformer eagerly between two segments of a segmented graph.

    Six a block, four in passes with isolated modalities. Outside a recording nothing changes. An attention
    computes queries, keys and values itself and writes into none of its arguments, so breaks share the
    memory of those. Call it once.
    """
    attentions: list[Any] = [module for module in transformer.modules() if isinstance(module, LTX2Attention)]
    for attention in attentions:
        attention.forward = graph_break(reads_only=True)(attention.forward)


class DenoisingByPass(Denoising):
    """Every pass of a step is a graph of its own: with breaks, one of a whole step has too many segments.

    48 blocks make 289 segments a pass; the three kinds of passes of a guided step would make 769. The loop
    is none of graphs then, so `accel.loop` does not apply, and a video size takes an entry for each kind.
    """

    def advance(
        self, carry: Latents, step: DenoisingStep, shared: Conditioning, *, guidance: Guidance
    ) -> Latents:
        return super().advance(carry, step, shared, guidance=guidance)

    @region
    def forward_pass(
        self,
        latents: Latents,
        level: NoiseLevel,
        text: Text | TextKeys,
        rope: RotaryTables,
        given: Tensor | None,
        *,
        perturbed: tuple[int, ...] = (),
        isolated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return super().forward_pass(latents, level, text, rope, given, perturbed=perturbed, isolated=isolated)

    @region
    def euler_step(
        self,
        latents: Latents,
        velocities: tuple[Velocities, Velocities],
        sigma: Tensor,
        delta: Tensor,
        *,
        guidance: Guidance,
        keeps_first: bool,
    ) -> Latents:
        return super().euler_step(
            latents, velocities, sigma, delta, guidance=guidance, keeps_first=keeps_first
        )
