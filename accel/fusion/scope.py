"""Where fused kernels are allowed: a context around one region call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the current scope inside the `with` block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


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
