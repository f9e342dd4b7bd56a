"""A fused kernel against its reference on CUDA, for the tests beside this file."""

from __future__ import annotations

from typing import Any

from accel.fusion.compare import first_mismatch
from accel.fusion.registry import get


def assert_exact(site: str, args: tuple[Any, ...]) -> None:
    """Assert that the site's kernel takes the arguments and gives every bit of the reference."""
    kernel = get(site).load()
    assert kernel.refuses(*args) == ""
    mismatch = first_mismatch(get(site).reference(*args), kernel.run(*args))
    assert mismatch is None, str(mismatch)
