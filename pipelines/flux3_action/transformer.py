"""The FLUX 3 Action joint transformer (spec section 8).

Every stream first passes through blocks of its own (mode blocks); then all streams are
concatenated and share the joint blocks. The pieces are pure functions of tensors, so that what
depends on the time, the caption or the observation alone can be computed once (section 13).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from pipelines.flux3_action.fp8 import Fp8Linear
from pipelines.flux3_action.layers import (
    Block,
    Embedder,
    FinalLayer,
    Linear,
    LinearFactory,
    Modulation,
    StreamModulation,
    concat_modulations,
    fused_rows,
    run_blocks,
)
from pipelines.flux3_action.policy_config import CONTENT_STREAMS, TransformerConfig

__all__ = ["TEXT", "ActionTransformer", "Modulation", "concat_modulations", "timestep_embedding"]

TEXT = "txt"
TIME_CHANNELS = 256


def timestep_embedding(t: Tensor, channels: int) -> Tensor:
    """Sinusoids of 1000 t. t: fp32 (...) in [0, 1] -> fp32 (..., channels) = [cos | sin]."""
    half = channels // 2
    index = torch.arange(half, dtype=torch.float32, device=t.device)
    frequencies = torch.exp(-math.log(10000) * index / half)
    angles = (1000 * t).unsqueeze(-1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class ActionTransformer(nn.Module):
    """Joint denoiser of video latents and actions.

    Parameters are uninitialised, on the current default device; fill them through
    `checkpoint_slots`. D: hidden_size. Streams: `config.streams`, and "txt" for modulations.

    dtype: of activations and of every parameter that is not FP8.
    quantization: `fp8r` makes all linears `Fp8Linear` but the action streams' input embeddings,
        modulations and final layers (spec section 12).
    """

    def __init__(
        self, config: TransformerConfig, *, dtype: torch.dtype, quantization: Literal["fp8r"] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        width = config.hidden_size
        plain: LinearFactory = partial(Linear, dtype=dtype)
        shared: LinearFactory = Fp8Linear if quantization == "fp8r" else plain
        own = {s: shared if s in CONTENT_STREAMS else plain for s in config.streams}
        modulated = {TEXT: shared, **own}

        def mode_blocks(count: int) -> nn.ModuleList:
            return nn.ModuleList(Block(config, shared, dtype=dtype) for _ in range(count))

        self.emb_in = nn.ModuleDict({s: own[s](n, width) for s, n in config.in_channels.items()})
        self.txt_in = shared(config.context_in_dim, width)
        self.time_in = Embedder(TIME_CHANNELS, width, shared)
        self.vector_in = None if config.vec_in_dim is None else Embedder(config.vec_in_dim, width, shared)
        self.early_stream_modulations = _modulations(modulated, width)
        self.single_stream_modulations = _modulations(modulated, width)
        self.content_mode_blocks = nn.ModuleDict({s: mode_blocks(config.depth) for s in config.streams})
        self.txt_mode_blocks = mode_blocks(config.depth)
        self.single_blocks = mode_blocks(config.depth_single_blocks)
        self.final_layer = nn.ModuleDict(
            {s: FinalLayer(width, n, own[s]) for s, n in config.in_channels.items()}
        )

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Checkpoint key, without the "dit." prefix -> the storage to copy that tensor into."""
        parts = fused_rows(self.config)
        slots: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            block, fused, suffix = name.partition(".proj_in.")
            if not fused:
                slots[name] = parameter.data
                continue
            rows = torch.split(parameter.data, list(parts.values()))
            slots.update({f"{block}.{part}.{suffix}": r for part, r in zip(parts, rows, strict=True)})
        return slots

    def time_vector(self, t: Tensor, vector: Tensor | None = None) -> Tensor:
        """The conditioning vec of a time: (B, 1, D) or, per token, (B, L, D), model dtype.

        t: fp32 (B,) or (B, L) in [0, 1]. vector: (B, vec_in_dim), model dtype; None is zero, which
        adds nothing since there are no biases.
        """
        per_token = t if t.ndim == 2 else t.unsqueeze(1)
        vec: Tensor = self.time_in(timestep_embedding(per_token, TIME_CHANNELS).to(self.dtype))
        if vector is None:
            return vec
        if self.vector_in is None:
            raise ValueError("this transformer has no vector input (vec_in_dim is null)")
        return vec + torch.unsqueeze(self.vector_in(vector), 1)

    def early_modulation(self, stream: str, vec: Tensor) -> Modulation:
        """Modulation of the mode blocks of `stream`, or of "txt"."""
        modulation: Modulation = self.early_stream_modulations[stream](vec)
        return modulation

    def joint_modulation(self, stream: str, vec: Tensor) -> Modulation:
        """Modulation of the joint blocks on the segment of `stream`, or of "txt"."""
        modulation: Modulation = self.single_stream_modulations[stream](vec)
        return modulation

    def final_modulation(self, stream: str, vec: Tensor) -> tuple[Tensor, Tensor]:
        """(shift, scale) of the head of `stream`, each shaped like vec."""
        return self._final(stream).modulation(vec)

    def embed_text(self, context: Tensor, modulation: Modulation, rope: Tensor) -> Tensor:
        """context (B, L, context_in_dim) -> hidden (B, L, D) after the text mode blocks."""
        return _run(self.txt_mode_blocks, self.txt_in(context), modulation, rope)

    def embed_stream(self, stream: str, tokens: Tensor, modulation: Modulation, rope: Tensor) -> Tensor:
        """tokens (B, L, channels) -> hidden (B, L, D) after the mode blocks of `stream`."""
        return _run(self.content_mode_blocks[stream], self.emb_in[stream](tokens), modulation, rope)

    def joint(self, hidden: Tensor, modulation: Modulation, rope: Tensor) -> Tensor:
        """The joint blocks over the whole sequence.

        hidden: (B, L, D), segments [txt, video, video_cond, actions, state] as far as present.
        modulation: from `concat_modulations`. rope: fp32 (B, L, head_dim), same order.
        """
        return _run(self.single_blocks, hidden, modulation, rope)

    def head(self, stream: str, hidden: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Velocity (B, L, channels) of `stream` from its segment (B, L, D) of the joint result."""
        velocity: Tensor = self._final(stream)(hidden, shift, scale)
        return velocity

    def forward(
        self,
        context: Tensor,
        tokens: Mapping[str, Tensor],
        ropes: Mapping[str, Tensor],
        times: Mapping[str, Tensor],
        vector: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """One complete evaluation (spec section 8.3), nothing reused.

        context: (B, Ltxt, context_in_dim). tokens: stream -> (B, L, channels), any subset of the
        streams. ropes: the table of each of those streams and of "txt". times: stream -> fp32 (B,)
        or (B, L); streams without one, and the text, are at time 0.
        Returns the velocity of every stream fed, (B, L, channels).
        """
        zero = torch.zeros(context.shape[0], dtype=torch.float32, device=context.device)
        streams = [stream for stream in self.config.streams if stream in tokens]
        segments = [TEXT, *streams]
        vecs = {s: self.time_vector(times.get(s, zero), vector) for s in segments}
        early = {s: self.early_modulation(s, vecs[s]) for s in segments}
        hidden = [self.embed_text(context, early[TEXT], ropes[TEXT])]
        hidden += [self.embed_stream(s, tokens[s], early[s], ropes[s]) for s in streams]
        lengths = [segment.shape[1] for segment in hidden]
        modulation = concat_modulations([self.joint_modulation(s, vecs[s]) for s in segments], lengths)
        rope = torch.cat([ropes[s] for s in segments], dim=1)
        joined = self.joint(torch.cat(hidden, dim=1), modulation, rope)
        _, *results = torch.split(joined, lengths, dim=1)
        return {
            s: self.head(s, result, *self.final_modulation(s, vecs[s]))
            for s, result in zip(streams, results, strict=True)
        }

    def _final(self, stream: str) -> FinalLayer:
        layer = self.final_layer[stream]
        assert isinstance(layer, FinalLayer)
        return layer


def _modulations(linears: Mapping[str, LinearFactory], width: int) -> nn.ModuleDict:
    return nn.ModuleDict({stream: StreamModulation(width, linear) for stream, linear in linears.items()})


def _run(blocks: nn.Module, hidden: Tensor, modulation: Modulation, rope: Tensor) -> Tensor:
    assert isinstance(blocks, nn.ModuleList)
    return run_blocks(list(blocks), hidden, modulation, rope)
