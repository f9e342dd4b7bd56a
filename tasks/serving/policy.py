"""What the server needs of a policy. Protocols know no more of the pipeline than this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

Steps = Annotated[int, Meta(ge=1)]
Scale = Annotated[float, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may ask of the sampler; `None` is the policy's own value (spec section 14.3).

    action_horizon: actions returned. seed: of the noise.
    """

    num_inference_steps: Steps | None = None
    action_horizon: Steps | None = None
    seed: Seed | None = None
    guidance_scale: Scale | None = None
    guidance_scale_action: Scale | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One chunk of actions.

    actions: float32 (K, A), dataset units. steps: denoising steps taken. caption_cached: the prompt had
    been encoded before; `None` where captions are not kept. stage_ms: times of text, observation, denoise
    and postprocess.
    """

    actions: npt.NDArray[np.float32]
    steps: int
    caption_cached: bool | None = None
    stage_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RegionCalls:
    """How often regions of a stage ended in one way: replayed, captured, or eager for a reason."""

    stage: str
    outcome: str
    reason: str
    count: int


class Policy(Protocol):
    """Observations to actions. `warm_up` and `infer` are called by one thread, one call at a time."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What a client learns about the policy first; spec section 14.1."""

    def warm_up(self) -> None:
        """Make everything ready, with the true shapes, and prove it. Raises: what ends the server."""

    def prepare(self, observation: Mapping[str, Any], parameters: Parameters) -> Any:
        """A checked request. Any thread.

        observation: its arrays may be read-only; torch has to be given copies.
        Raises: SamebitError, whose message goes to the client.
        """

    def infer(self, request: Any) -> Answer:
        """Raises: anything; the client learns no more than that the server is at fault."""

    def region_calls(self) -> Iterable[RegionCalls]:
        """Counts since the start. Any thread."""
