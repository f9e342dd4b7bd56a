"""Forwards that call fusion sites, bound over the stock ones of a library's modules, and taken off again."""

from accel.fusion.mounting.block_forward import BlockForward, Draw
from accel.fusion.mounting.fingerprint import Fingerprint, fingerprint, minor_version, qualified_name
from accel.fusion.mounting.mount import Mount, is_mounted, mount
from accel.record import MountReport

__all__ = [
    "BlockForward",
    "Draw",
    "Fingerprint",
    "Mount",
    "MountReport",
    "fingerprint",
    "is_mounted",
    "minor_version",
    "mount",
    "qualified_name",
]
