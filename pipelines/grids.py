"""Numbers that a model makes in steps alone, such as heights and widths. Free of torch."""

from __future__ import annotations

from accel.errors import ConfigError


def require_grid(name: str, value: int | None, *, step: int, first: int, last: int, legal: str) -> None:
    """Refuse what is not `first` plus a multiple of `step`, up to `last`; `None` is not set.

    last: one of them. legal: what is expected, in words. Raises: ConfigError with the nearest legal values.
    """
    if value is None or (first <= value <= last and (value - first) % step == 0):
        return
    below = first + max(value - first, 0) // step * step
    nearest = f"the nearest are {below} and {below + step}" if below < last else f"the largest is {last}"
    raise ConfigError(f"model.{name}: expected {legal}, got {value}; {nearest}.")
