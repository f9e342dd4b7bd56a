"""Says, in words and not too often, why calls found no graph."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from accel.graphs.signature import Signature, differences

_log = logging.getLogger("samebit")


class MissLog:
    """Compares missed signatures with the nearest captured one. Bounded, whatever the callers do."""

    _MAX_DISTINCT = 8

    def __init__(self, name: str) -> None:
        self._name = name
        self._noted: dict[Signature, str] = {}
        self._warned = False

    def note(self, signature: Signature, captured: Iterable[Signature], *, full: bool) -> str:
        """What sets the signature apart, e.g. "latents: shape (1, 17) vs (1, 81)"; the first 8 only.

        full: no graph will be made for it, which is worth one warning per region.
        """
        text = self._noted.get(signature)
        if text is None and len(self._noted) < self._MAX_DISTINCT:
            text = self._noted[signature] = _nearest(signature, captured)
            if text:  # the first call of a region has nothing to be compared with
                _log.info("%s: no graph for this call yet. %s", self._name, text)
        if full and not self._warned:
            self._warned = True
            _log.warning(
                "%s: no more graphs for now (%s); such calls run eager. Keep shapes and weights stable, pass "
                "what varies as a tensor, or raise accel.max_entries.",
                self._name,
                text or _nearest(signature, captured) or "weights or kernels keep changing",
            )
        return "differs from every captured call" if text is None else text


def _nearest(signature: Signature, captured: Iterable[Signature]) -> str:
    """The differences from the captured signature with the fewest of them."""
    found = min((differences(signature, other) for other in captured), key=len, default=[])
    return "; ".join(found[:3])
