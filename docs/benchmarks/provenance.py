"""What every report of a benchmark says of where and when it was measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tasks.environment import device_facts, software


def provenance(device: object) -> dict[str, Any]:
    """The first entries of a report. device: as torch names it."""
    return {"date": time.strftime("%Y-%m-%d"), "software": software(), "device": device_facts(str(device))}


def versions(report: Mapping[str, Any]) -> str:
    """Of the software, in a line."""
    return ", ".join(f"{name} {version}" for name, version in report["software"].items())


def stamp(report: Mapping[str, Any], *more: str) -> str:
    """The line below a page's title. more: what else the figures depend on."""
    return f"{', '.join((report['date'], report['device']['name'], *more))}; {versions(report)}."
