"""Flow-matching samplers (FLUX 3 Action spec section 10).

The network predicts `v = noise - data` for `x = sigma noise + (1 - sigma) data`. Everything that
depends on the step count and the shift is computed once, in float64, into a `SamplerPlan` of plain
numbers. A step is then a pure function of fp32 tensors: its `Solver` says which terms there are, and
the numbers come as one fp32 tensor, so that steps with the same terms run the same operations. No
formula divides tensors by numbers, which devices round differently. Every stream keeps its own
`History`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from accel.errors import ConfigError
from accel.policy import require_known


@dataclass(frozen=True)
class History:
    """What a solver remembers of one stream; empty before its first step. Tensors are fp32, like the sample.

    predictions: data predictions of the last steps, newest first, at most two.
    predicted_from: the sample that the last predictor started from.
    """

    predictions: tuple[Tensor, ...] = ()
    predicted_from: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Update:
    """Coefficients of one UniPC update from an anchor sample x and the data predictions there.

    x' = keep x + data m + curve (m_before - m) inverse_ratio + correction (m_new - m)

    curve, inverse_ratio: used by second-order updates only. correction: used by correctors only.
    """

    keep: float = 0.0
    data: float = 0.0
    curve: float = 0.0
    inverse_ratio: float = 0.0
    correction: float = 0.0


_N_UPDATE = len(astuple(Update()))


@dataclass(frozen=True, kw_only=True)
class UniPC:
    """One step of `cosmos_unipc`. Coefficients: sigma, the corrector's `Update`, the predictor's.

    corrector: its order; 0 for the first step, which has nothing to correct, and for the last, whose
    result does not depend on it. predictor: likewise; 0 for the last step, which returns the data
    prediction and remembers nothing.
    """

    corrector: int
    predictor: int

    def __call__(
        self, coefficients: Tensor, sample: Tensor, velocity: Tensor, history: History
    ) -> tuple[Tensor, History]:
        sigma, *numbers = coefficients.unbind()
        newest = sample - sigma * velocity
        if self.predictor == 0:
            return newest, History()
        if self.corrector:
            assert history.predicted_from is not None
            sample = _update(
                self.corrector, numbers[:_N_UPDATE], history.predicted_from, history.predictions, newest
            )
        predictions = (newest, *history.predictions[:1])
        after = _update(self.predictor, numbers[_N_UPDATE:], sample, predictions)
        return after, History(predictions, sample)


@dataclass(frozen=True)
class Euler:
    """One step of `euler`: x' = x + delta v. Coefficients: delta."""

    def __call__(
        self, coefficients: Tensor, sample: Tensor, velocity: Tensor, history: History
    ) -> tuple[Tensor, History]:
        return sample + coefficients[0] * velocity, history


Solver: TypeAlias = UniPC | Euler


@dataclass(frozen=True)
class SolverStep:
    """One step of a plan on a device.

    solver: which terms there are, hashable. coefficients: fp32 (n,), as the solver lists them.
    """

    solver: Solver
    coefficients: Tensor

    def __call__(self, sample: Tensor, velocity: Tensor, history: History) -> tuple[Tensor, History]:
        """Move one stream's `sample` to the next noise level.

        sample, velocity: fp32, same shape; velocity is the network's, after guidance, at this step's
        time. Returns the next sample and the history to hand to the next step.
        """
        return self.solver(self.coefficients, sample, velocity, history)


@dataclass(frozen=True, kw_only=True)
class SamplerPlan:
    """A sampler for one step count and shift. Hashable: all numbers, no tensors.

    times: the n times given to the network, each an exact fp32 value in [0, 1].
    sigmas: the n + 1 noise levels of the solver, fp32 values, from high to 0.
    solvers, coefficients: of the n steps.
    """

    name: str
    times: tuple[float, ...]
    sigmas: tuple[float, ...]
    solvers: tuple[Solver, ...]
    coefficients: tuple[tuple[float, ...], ...]

    def steps(self, device: torch.device) -> tuple[SolverStep, ...]:
        """The n steps from `sigmas[0]` to 0, to be called in order."""
        rows = [torch.tensor(row, dtype=torch.float32, device=device) for row in self.coefficients]
        return tuple(SolverStep(*step) for step in zip(self.solvers, rows, strict=True))


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


def _update(
    order: int,
    coefficients: Sequence[Tensor],
    anchor: Tensor,
    predictions: Sequence[Tensor],
    newest: Tensor | None = None,
) -> Tensor:
    """See `Update`. predictions: m and, for order 2, m_before. newest: m_new, for correctors."""
    keep, data, curve, inverse_ratio, correction = coefficients
    latest = predictions[0]
    sample = keep * anchor + data * latest
    if order == 2:
        sample = sample + curve * ((predictions[1] - latest) * inverse_ratio)
    if newest is not None:
        sample = sample + correction * (newest - latest)
    return sample


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
    solvers = tuple(_unipc_solver(i, steps) for i in range(steps))
    return SamplerPlan(
        name="cosmos_unipc",
        times=tuple(times.tolist()),
        sigmas=sigmas,
        solvers=solvers,
        coefficients=tuple(_unipc_coefficients(solver, sigmas, i) for i, solver in enumerate(solvers)),
    )


def _unipc_solver(i: int, steps: int) -> UniPC:
    last = i == steps - 1
    return UniPC(
        corrector=0 if i == 0 or last else _order(i - 1, steps), predictor=0 if last else _order(i, steps)
    )


def _order(i: int, steps: int) -> int:
    return min(2, steps - i, i + 1)


def _unipc_coefficients(solver: UniPC, sigmas: Sequence[float], i: int) -> tuple[float, ...]:
    corrector = _corrector(sigmas, i, order=solver.corrector) if solver.corrector else Update()
    predictor = _predictor(sigmas, i, order=solver.predictor) if solver.predictor else Update()
    return (sigmas[i], *astuple(corrector), *astuple(predictor))


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
    return Update(keep=keep, data=weight, curve=0.5 * weight, inverse_ratio=_inverse(ratio))


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
    return Update(
        keep=keep,
        data=weight,
        curve=c1 * weight,
        inverse_ratio=_inverse(ratio),
        correction=c2 * weight,
    )


def _inverse(ratio: float) -> float:
    """fp32 reciprocal of the fp32 number: what a CUDA tensor divided by `ratio` is multiplied by."""
    return float(1 / np.float32(ratio))


def _euler(steps: int, shift: float) -> SamplerPlan:
    """First order on the shifted grid; the network sees the noise level itself, in fp32."""
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float32, device="cpu")
    sigmas = shift * grid / (1 + (shift - 1) * grid)
    return SamplerPlan(
        name="euler",
        times=tuple(sigmas[:-1].tolist()),
        sigmas=tuple(sigmas.tolist()),
        solvers=(Euler(),) * steps,
        coefficients=tuple((delta,) for delta in sigmas.diff().tolist()),
    )


_PLANS = {"cosmos_unipc": _cosmos_unipc, "euler": _euler}
