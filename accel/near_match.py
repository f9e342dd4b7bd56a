"""Suggestions for misspelt names. Free of torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, if any does."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def suggestion(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: "; did you mean 'vae'? Known: denoising, vae."."""
    near = nearest(name, known)
    return (f"; did you mean '{near}'?" if near else ".") + f" Known: {', '.join(known)}."
