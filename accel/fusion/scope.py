"""Where fused kernels are allowed: a context around one region call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from accel.policy import require_known
from accel.record import SiteOutcome
from accel.site_names import FUSED_NAMES


@dataclass(frozen=True)
class Scope:
    """allowed: sites that may fuse and savings that may be taken. observe: told the outcome of every call.

    Raises: ConfigError for a name that neither a site nor a saving carries.
    """

    allowed: frozenset[str]
    observe: Callable[[SiteOutcome], None]

    def __post_init__(self) -> None:
        for name in self.allowed:
            require_known("fusion_scope", name, FUSED_NAMES)

    def entered(self) -> AbstractContextManager[None]:
        """Make this the current scope inside the `with` block."""
        return _Entered(self)


class _Entered(AbstractContextManager[None]):
    """A class rather than a generator: every call of a region goes through it before its launch."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        self._token = _current.set(self._scope)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


_current: ContextVar[Scope | None] = ContextVar("fusion_scope", default=None)


def current_scope() -> Scope | None:
    """The innermost scope of this thread or task; `None` outside of any."""
    return _current.get()


def fusion_scope(
    allowed: frozenset[str], observe: Callable[[SiteOutcome], None]
) -> AbstractContextManager[None]:
    """Let the sites in `allowed` run their verified kernels inside the `with` block; savings likewise.

    Raises: ConfigError for a name that neither a site nor a saving carries.
    """
    return Scope(allowed, observe).entered()
