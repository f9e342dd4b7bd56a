"""What a user sets for the tasks that compare and measure. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from pipelines.number_types import Count

WarmUps = Annotated[int, Meta(ge=0)]
Reference = Literal["eager", "graph", "segmented", "fused", "graph+fused", "compile"]


@dataclass(frozen=True, kw_only=True)
class VerifyTask:
    """Prove that acceleration changes no bit. requests: unlike ones, each compared twice with eager."""

    name: Literal["verify"]
    requests: Count = 3


@dataclass(frozen=True, kw_only=True)
class BenchTask:
    """Time `accel` against another choice of it, by default eager.

    warmup, calls: untimed and timed requests of each arm, after a cold one. trace: write a timeline of one
    more request of each arm.
    """

    name: Literal["bench"]
    against: Reference = "eager"
    warmup: WarmUps = 10
    calls: Count = 50
    trace: bool = False


@dataclass(frozen=True, kw_only=True)
class ProfileTask:
    """Where the time of a request goes.

    warmup, calls: untimed and timed requests before the profiled one, after a cold one. top: kernels shown
    of each stage; the file has all.
    """

    name: Literal["profile"]
    warmup: WarmUps = 3
    calls: Count = 10
    top: Count = 8
