"""Numbers as text of table cells. Free of torch."""

from __future__ import annotations

NONE = "-"


def milliseconds(value: float | None) -> str:
    """At least three significant digits; tenths below a second."""
    if value is None:
        return NONE
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:.{digits}f}"


def count(value: int | None) -> str:
    """For example "12,345"."""
    return NONE if value is None else f"{value:,}"


def times(value: float | None) -> str:
    """A speed-up, for example "1.25 x"."""
    return NONE if value is None else f"{value:.2f} x"


def scientific(value: float | None) -> str:
    """For example "1.2e-03"."""
    return NONE if value is None else f"{value:.1e}"


def percent(value: float | None) -> str:
    """value: a share of 1."""
    return NONE if value is None else f"{100 * value:.0f} %"


def mebibytes(value: int) -> str:
    """value: bytes."""
    return f"{value / 2**20:,.0f}"
