"""LTX-2's guidance: up to three contrasts added to the data prediction, then its contrast restored.

Everything is fp32 and in the order of diffusers' LTX-2 pipelines, since sums round. Sources: classifier-free
guidance, Ho and Salimans 2022; spatio-temporal guidance, Hyung et al. 2024; rescaling, Lin et al. 2023,
section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accel.errors import ConfigError
from pipelines.request_rules import number, require_rules, whole


@dataclass(frozen=True, kw_only=True)
class Scales:
    """How strongly one modality is guided. All off: 1, 0, 1, 0.

    text: against the negative prompt; 1 is off. stg: against the pass with perturbed self-attention; 0 is
    off. modality: against the pass in which the modalities do not see each other; 1 is off. rescale: share
    of the result that is brought back to the standard deviation of the unguided one, 0..1.
    Raises: ConfigError for what is no finite number >= 0, and a share above 1.
    """

    text: float
    stg: float
    modality: float
    rescale: float

    def __post_init__(self) -> None:
        scales = {name: number(getattr(self, name), 0) for name in ("text", "stg", "modality")}
        require_rules(self, {**scales, "rescale": number(self.rescale, 0, 1)})


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Scales of both modalities. stg_blocks: transformer blocks that spatio-temporal guidance perturbs.

    Text and modality scales below 1 are off, like 1, unless the other modality's is above 1: its pass is run
    for both, and would lead the lower one the other way. That is refused.
    Raises: ConfigError for such a pair, and for blocks that are no tuple of block numbers or are missing.
    """

    video: Scales
    audio: Scales
    stg_blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        blocks = self.stg_blocks
        numbered = isinstance(blocks, tuple) and all(whole(block, 0)[0] for block in blocks)
        require_rules(self, {"stg_blocks": (numbered, "a tuple of block numbers")})
        if self.stg and not blocks:
            raise ConfigError(
                "model.stg_blocks: is empty; name the blocks to perturb, or switch off with model.stg=0."
            )
        _require_one_way(("model.guidance", self.video.text), ("model.guidance_audio", self.audio.text))
        _require_one_way(
            ("guidance.video.modality", self.video.modality),
            ("guidance.audio.modality", self.audio.modality),
        )

    @property
    def text(self) -> bool:
        """Whether the negative prompt is needed: every step runs a second row for it."""
        return self.video.text > 1 or self.audio.text > 1

    @property
    def stg(self) -> bool:
        """Whether every step runs a perturbed pass."""
        return self.video.stg > 0 or self.audio.stg > 0

    @property
    def modality(self) -> bool:
        """Whether every step runs a pass with isolated modalities."""
        return self.video.modality > 1 or self.audio.modality > 1


def _require_one_way(video: tuple[str, float], audio: tuple[str, float]) -> None:
    (lower_name, lower), (name, scale) = sorted((video, audio), key=lambda named: named[1])
    if lower < 1 < scale:
        raise ConfigError(
            f"{lower_name}={lower:g}: below 1 it leads the other way beside {name}={scale:g}; 1.0 is off."
        )


_OFF = Scales(text=1.0, stg=0.0, modality=1.0, rescale=0.0)
UNGUIDED = Guidance(video=_OFF, audio=_OFF, stg_blocks=())


@dataclass(frozen=True, kw_only=True)
class Velocities:
    """Predictions of one modality, fp32, all of the shape of its latents; `None` where a pass is not run."""

    conditional: Tensor
    unconditional: Tensor | None = None
    perturbed: Tensor | None = None
    isolated: Tensor | None = None


def guide(latents: Tensor, sigma: Tensor, velocities: Velocities, scales: Scales) -> Tensor:
    """The guided velocity of one modality, fp32.

    latents: fp32 (B, tokens, C) at noise level `sigma`, an fp32 scalar in (0, 1].
    """

    def clean(velocity: Tensor) -> Tensor:
        return latents - velocity * sigma

    conditional = clean(velocities.conditional)
    guided = conditional
    for velocity, weight in (
        (velocities.unconditional, scales.text - 1),
        (velocities.perturbed, scales.stg),
        (velocities.isolated, scales.modality - 1),
    ):
        if velocity is not None:
            guided = guided + weight * (conditional - clean(velocity))
    if scales.rescale > 0:
        guided = _rescaled(guided, conditional, scales.rescale)
    return (latents - guided) / sigma


def _rescaled(guided: Tensor, conditional: Tensor, share: float) -> Tensor:
    dims = list(range(1, guided.ndim))
    ratio = conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
    return share * (guided * ratio) + (1 - share) * guided
