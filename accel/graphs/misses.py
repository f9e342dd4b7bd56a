"""Says, in words and not too often, why calls found no graph."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from accel.graphs.signature import Signature, describe_leaf, differences
from accel.graphs.tree import Constant, argument_name, leaf_names

_log = logging.getLogger("samebit")


class MissLog:
    """Compares missed signatures with the nearest captured one. Bounded, whatever the callers do."""

    _MAX_DISTINCT = 8

    def __init__(self, name: str) -> None:
        self._name = name
        self._noted: dict[Signature, str] = {}
        self._constants = _VaryingConstants()
        self._warned = False

    def note(self, signature: Signature, captured: Iterable[Signature], *, full: bool) -> str:
        """What sets the signature apart, e.g. "latents: shape (1, 17) vs (1, 81)"; the first 8 only.

        full: no graph will be made for it, which is worth one warning per region, unless a constant that
        varies explains it already.
        """
        text = self._noted.get(signature)
        if text is None and len(self._noted) < self._MAX_DISTINCT:
            text = self._noted[signature] = _nearest(signature, captured)
            if text:  # the first call of a region has nothing to be compared with
                _log.info("%s: no graph for this call yet. %s", self._name, text)
        if not self._warned and (varying := self._constants.find(signature)):
            self._warned = True
            _log.warning(
                "%s: %s. Every value needs a graph of its own; pass it as a tensor.", self._name, varying
            )
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


class _VaryingConstants:
    """Finds a constant that takes value after value while all else stays the same (graph spec section 2)."""

    _MAX_VALUES = 4
    _MAX_CONSTANTS = 64
    _MAX_GROUPS = 1024

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], dict[Constant, None]] = {}

    def find(self, signature: Signature) -> str:
        """E.g. "g took 5 values while all else was equal (0.0, 0.1, ...)"; empty if there is none."""
        leaves = list(leaf_names(signature.arguments))
        constants = [(name, leaf) for name, leaf in leaves if isinstance(leaf, Constant)]
        if len(constants) > self._MAX_CONSTANTS:
            return ""
        everything = hash((signature.environment, signature.fused))
        for name, leaf in leaves:
            everything ^= hash((name, leaf))
        for name, constant in constants:
            all_else = everything ^ hash((name, constant))
            if len(self._values) >= self._MAX_GROUPS:
                self._values.clear()
            values = self._values.setdefault((name, all_else), {})
            values[constant] = None
            if len(values) > self._MAX_VALUES:
                seen = ", ".join(map(describe_leaf, values))
                return f"{argument_name(name)} took {len(values)} values while all else was equal ({seen})"
        return ""
