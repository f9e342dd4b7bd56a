"""Where fused kernels are allowed: a context around one region call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from accel.policy import require_known
from accel.record import SiteOutcome
from accel.site_names import SITE_NAMES


@dataclass(frozen=True)
class Scope:
    """allowed: site names that may fuse. observe: told the outcome of every site call."""

    allowed: frozenset[str]
    observe: Callable[[SiteOutcome], None]


_current: ContextVar[Scope | None] = ContextVar("fusion_scope", default=None)


def current_scope() -> Scope | None:
    """The innermost scope of this thread or task; `None` outside of any."""
    return _current.get()


@contextmanager
def fusion_scope(allowed: frozenset[str], observe: Callable[[SiteOutcome], None]) -> Iterator[None]:
    """Let the sites in `allowed` run their verified kernels inside the `with` block.

    Raises: ConfigError for a name that no site carries.
    """
    for name in allowed:
        require_known("fusion_scope", name, SITE_NAMES)
    token = _current.set(Scope(allowed, observe))
    try:
        yield
    finally:
        _current.reset(token)
