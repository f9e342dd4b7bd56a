"""Everything about a request that does not depend on its pixels, prompt or seed (spec section 13).

`StaticTables` live as long as the model; `DenoisingStep`s as long as a (sampler, steps, shift) choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accel.fusion.segments import token_rows
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.position_ids import stream_position_ids, text_position_ids
from pipelines.flux3_action.rope import rope_table
from pipelines.flux3_action.transformer import TEXT, ActionTransformer, Modulation
from stages.samplers import SamplerPlan, SolverStep

VIDEO = "video"
VIDEO_COND = "video_cond"


class StaticTables(nn.Module):
    """Rotary tables of the four streams and the modulations of everything that sits at time 0.

    rope_<stream>: fp32 (1, L, head_dim), [cos | sin]. Buffers, so that a captured graph and its
    signature see them as they see weights.
    """

    def __init__(self, config: PolicyConfig, transformer: ActionTransformer, *, device: torch.device) -> None:
        super().__init__()
        self.eval()
        self._config = config
        self._device = device
        self.action = config.action_stream
        self.state = config.state_stream
        ids = stream_position_ids(config)
        for stream in (VIDEO, VIDEO_COND, self.action, self.state):
            self.register_buffer(f"rope_{stream}", self._rope(ids[stream]))
        for name, tensor in self._from_weights(transformer):
            self.register_buffer(name, tensor)

    @torch.inference_mode()
    def refresh(self, transformer: ActionTransformer) -> None:
        """Compute the modulations again, in place, after weights changed in place."""
        for name, tensor in self._from_weights(transformer):
            self.get_buffer(name).copy_(tensor)

    def rope(self, stream: str) -> Tensor:
        return self.get_buffer(f"rope_{stream}")

    def early(self, stream: str) -> Modulation:
        return self._modulation(f"early_{stream}")

    def joint(self, stream: str) -> Modulation:
        return self._modulation(f"joint_{stream}")

    def text_rope(self, length: int) -> Tensor:
        """fp32 (1, length, head_dim) of a caption padded to `length` tokens."""
        return self._rope(text_position_ids(length))

    def _rope(self, ids: Tensor) -> Tensor:
        transformer = self._config.transformer
        table = rope_table(ids, axes_dim=transformer.axes_dim, theta=transformer.theta)
        return table.to(self._device)

    def _from_weights(self, transformer: ActionTransformer) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every buffer that depends on weights."""
        vec = transformer.time_vector(torch.zeros(1, dtype=torch.float32, device=self._device))
        for stream in (TEXT, VIDEO_COND, self.state):
            for kind, modulate in (
                ("early", transformer.early_modulation),
                ("joint", transformer.joint_modulation),
            ):
                modulation = modulate(stream, vec)
                yield f"{kind}_{stream}_shift", token_rows(modulation.shift)
                yield f"{kind}_{stream}_scale", token_rows(modulation.scale)
                yield f"{kind}_{stream}_gate", token_rows(modulation.gate)

    def _modulation(self, name: str) -> Modulation:
        return Modulation(
            shift=self.get_buffer(f"{name}_shift"),
            scale=self.get_buffer(f"{name}_scale"),
            gate=self.get_buffer(f"{name}_gate"),
        )


@dataclass(frozen=True)
class StreamStep:
    """Modulation of one target stream at one step; every tensor is (1, 1, D)."""

    early: Modulation
    joint: Modulation
    final_shift: Tensor
    final_scale: Tensor


@dataclass(frozen=True)
class StepTable:
    """Modulation of both target streams at one step."""

    video: StreamStep
    action: StreamStep


@dataclass(frozen=True)
class Targets:
    """Both target streams after their mode blocks. video: (1, V, D). action: (1, K, D)."""

    video: Tensor
    action: Tensor


@dataclass(frozen=True)
class DenoisingStep:
    """The inputs of one denoising step. targets: of the first one, where they are known before."""

    table: StepTable
    solver: SolverStep
    targets: Targets | None = None


def denoising_steps(
    transformer: ActionTransformer, action_stream: str, plan: SamplerPlan, *, device: torch.device
) -> tuple[DenoisingStep, ...]:
    """One a step of the plan. Each time is evaluated alone: batching them could change bits."""
    steps = []
    for time, solver in zip(plan.times, plan.steps(device), strict=True):
        vec = transformer.time_vector(torch.tensor([time], dtype=torch.float32, device=device))
        table = StepTable(
            video=_stream_step(transformer, VIDEO, vec),
            action=_stream_step(transformer, action_stream, vec),
        )
        steps.append(DenoisingStep(table, solver))
    return tuple(steps)


def _stream_step(transformer: ActionTransformer, stream: str, vec: Tensor) -> StreamStep:
    final_shift, final_scale = transformer.final_modulation(stream, vec)
    return StreamStep(
        early=transformer.early_modulation(stream, vec),
        joint=transformer.joint_modulation(stream, vec),
        final_shift=final_shift,
        final_scale=final_scale,
    )
