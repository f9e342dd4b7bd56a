"""Flow-matching samplers (FLUX 3 Action spec section 10).

The network predicts `v = noise - data` for `x = sigma noise + (1 - sigma) data`. Everything that
depends on the step count and the shift is computed once, in float64, into a `SamplerPlan` of plain
numbers; its `step` is then a pure function of fp32 tensors. Every stream keeps its own `History`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from accel.errors import ConfigError
from accel.policy import require_known


@dataclass(frozen=True)
class History:
    """What a solver remembers of one stream. Tensors are fp32, shaped like the sample.

    predictions: data predictions of the last steps, newest first, at most two.
    predicted_from: the sample that the last predictor started from.
    """

    predictions: tuple[Tensor, ...] = ()
    predicted_from: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Update:
    """Coefficients of one UniPC update from an anchor sample x and the data predictions there.

    x' = keep x + data m + curve (m_before - m) / ratio + correction (m_new - m)

    curve, ratio: used by second-order updates only. correction: used by correctors only.
    """

    keep: float
    data: float
    curve: float = 0.0
    ratio: float | None = None
    correction: float = 0.0

    def __call__(self, anchor: Tensor, predictions: Sequence[Tensor], newest: Tensor | None = None) -> Tensor:
        """predictions: m and, for second order, m_before. newest: m_new, for correctors."""
        latest = predictions[0]
        sample = self.keep * anchor + self.data * latest
        if self.ratio is not None:
            sample = sample + self.curve * ((predictions[1] - latest) / self.ratio)
        if newest is not None:
            sample = sample + self.correction * (newest - latest)
        return sample


@dataclass(frozen=True, kw_only=True)
class UniPCStep:
    """One step of `cosmos_unipc`.

    corrector: None for the first step, which has nothing to correct, and for the last, whose
    result does not depend on it. predictor: None for the last step, which returns the data prediction.
    """

    sigma: float
    corrector: Update | None
    predictor: Update | None

    def __call__(self, sample: Tensor, velocity: Tensor, history: History) -> tuple[Tensor, History]:
        newest = sample - self.sigma * velocity
        if self.corrector is not None and history.predicted_from is not None:
            sample = self.corrector(history.predicted_from, history.predictions, newest)
        predictions = (newest, *history.predictions[:1])
        after = newest if self.predictor is None else self.predictor(sample, predictions)
        return after, History(predictions, sample)


@dataclass(frozen=True, kw_only=True)
class EulerStep:
    """One step of `euler`: x' = x + delta v."""

    delta: float

    def __call__(self, sample: Tensor, velocity: Tensor, history: History) -> tuple[Tensor, History]:
        return sample + self.delta * velocity, history


@dataclass(frozen=True, kw_only=True)
class SamplerPlan:
    """A sampler for one step count and shift. Hashable: all numbers, no tensors.

    times: the n times given to the network, each an exact fp32 value in [0, 1].
    sigmas: the n + 1 noise levels of the solver, fp32 values, from high to 0.
    """

    name: str
    times: tuple[float, ...]
    sigmas: tuple[float, ...]
    steps: tuple[UniPCStep, ...] | tuple[EulerStep, ...]

    def initial_history(self) -> History:
        """The history of a stream before its first step."""
        return History()

    def step(self, index: int, sample: Tensor, velocity: Tensor, history: History) -> tuple[Tensor, History]:
        """Move one stream's `sample` from `sigmas[index]` to the next level.

        sample, velocity: fp32, same shape; velocity is the network's, after guidance, at
        `times[index]`. Returns the next sample and the history to hand to the next step.
        """
        return self.steps[index](sample, velocity, history)


@lru_cache(maxsize=64)
def sampler_plan(name: str, *, steps: int, shift: float) -> SamplerPlan:
    """Build the plan of sampler `name` for `steps` >= 1 network evaluations and a time shift > 0.

    Raises: ConfigError for an unknown sampler or a number out of range.
    """
    require_known("sampler", name, tuple(_PLANS))
    if steps < 1:
        raise ConfigError(f"num_inference_steps is {steps}; give a whole number of at least 1.")
    if not (math.isfinite(shift) and shift > 0):
        raise ConfigError(f"sampler_shift is {shift}; give a finite number above 0, e.g. 5.0.")
    return _PLANS[name](steps, shift)


def _cosmos_unipc(steps: int, shift: float) -> SamplerPlan:
    """Order 2, B(h) form 2, data prediction; the network sees whole thousandths."""
    grid = np.linspace(float(np.float32(0.999)), 0.0, steps + 1)[:steps]
    exact = shift * grid / (1 + (shift - 1) * grid)
    times = np.trunc(1000 * exact).astype(np.float32) / np.float32(1000)
    sigmas = (*exact.astype(np.float32).tolist(), 0.0)
    if sigmas[0] >= 1 or len(set(sigmas)) < len(sigmas):
        raise ConfigError(
            f"cosmos_unipc can't tell its noise levels apart with {steps} steps and sampler_shift {shift}; "
            "use fewer steps or a shift nearer to 1."
        )
    return SamplerPlan(
        name="cosmos_unipc",
        times=tuple(times.tolist()),
        sigmas=sigmas,
        steps=tuple(_unipc_step(sigmas, i) for i in range(steps)),
    )


def _unipc_step(sigmas: Sequence[float], i: int) -> UniPCStep:
    steps = len(sigmas) - 1
    last = i == steps - 1
    return UniPCStep(
        sigma=sigmas[i],
        corrector=None if i == 0 or last else _corrector(sigmas, i, order=_order(i - 1, steps)),
        predictor=None if last else _predictor(sigmas, i, order=_order(i, steps)),
    )


def _order(i: int, steps: int) -> int:
    return min(2, steps - i, i + 1)


def _log_snr(sigma: float) -> float:
    return math.log1p(-sigma) - math.log(sigma)


def _predictor(sigmas: Sequence[float], i: int, *, order: int) -> Update:
    """From sigma_i to sigma_{i+1}; order 2 uses the prediction at sigma_{i-1}."""
    width = _log_snr(sigmas[i + 1]) - _log_snr(sigmas[i])
    weight = -(1 - sigmas[i + 1]) * math.expm1(-width)
    keep = sigmas[i + 1] / sigmas[i]
    if order == 1:
        return Update(keep=keep, data=weight)
    ratio = (_log_snr(sigmas[i - 1]) - _log_snr(sigmas[i])) / width
    return Update(keep=keep, data=weight, curve=0.5 * weight, ratio=ratio)


def _corrector(sigmas: Sequence[float], i: int, *, order: int) -> Update:
    """From sigma_{i-1} to sigma_i again, now knowing the prediction at sigma_i."""
    width = _log_snr(sigmas[i]) - _log_snr(sigmas[i - 1])
    growth = math.expm1(-width)
    weight = -(1 - sigmas[i]) * growth
    keep = sigmas[i] / sigmas[i - 1]
    if order == 1:
        return Update(keep=keep, data=weight, correction=0.5 * weight)
    ratio = (_log_snr(sigmas[i - 2]) - _log_snr(sigmas[i - 1])) / width
    first = growth / -width - 1
    second = first / -width - 0.5
    b1, b2 = first / growth, 2 * second / growth
    c1, c2 = (b1 - b2) / (1 - ratio), (b2 - ratio * b1) / (1 - ratio)
    return Update(keep=keep, data=weight, curve=c1 * weight, ratio=ratio, correction=c2 * weight)


def _euler(steps: int, shift: float) -> SamplerPlan:
    """First order on the shifted grid; the network sees the noise level itself, in fp32."""
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float32, device="cpu")
    sigmas = shift * grid / (1 + (shift - 1) * grid)
    return SamplerPlan(
        name="euler",
        times=tuple(sigmas[:-1].tolist()),
        sigmas=tuple(sigmas.tolist()),
        steps=tuple(EulerStep(delta=delta) for delta in sigmas.diff().tolist()),
    )


_PLANS = {"cosmos_unipc": _cosmos_unipc, "euler": _euler}
