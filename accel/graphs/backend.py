"""What a graph runner needs of a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class CaptureFailedError(Exception):
    """A capture was undone; nothing of it is left on the device.

    spoiled: another thread broke it, so that a later attempt may succeed.
    """

    def __init__(self, cause: Exception, *, spoiled: bool = False) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.spoiled = spoiled


class CapturedGraph(Protocol):
    """A recording that can be run again on the same memory.

    outputs: what the captured function returned; every replay overwrites its tensors.
    """

    outputs: Any

    def replay(self) -> None:
        """Enqueue the recorded work on the current stream."""

    def release(self) -> None:
        """Destroy the recording. The device must be idle."""


class GraphBackend(Protocol):
    """Capture and replay on one device."""

    device: torch.device

    def exclusive(self) -> AbstractContextManager[bool]:
        """Keep other threads of this device out. Gives False inside another `exclusive` block."""

    def warm_stream(self) -> AbstractContextManager[None]:
        """Make the long-lived capture stream current, ordered after and before the caller's stream."""

    def new_pool(self) -> Any:
        """A memory pool that the graphs of one region share. Each new one starts without graphs."""

    def capture(self, fn: Callable[[], Any], pool: Any) -> CapturedGraph:
        """Record `fn` inside `warm_stream`; nothing of it runs.

        Raises: CaptureFailedError after undoing the attempt; torch.OutOfMemoryError likewise.
        """

    def join_previous(self) -> None:
        """Order the current stream after the stream of the previous call."""

    def is_capturing(self) -> bool:
        """Whether the current stream is recording, for whomever."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def trim(self) -> None:
        """Wait, then give cached free memory back to the device."""

    def reserved_bytes(self) -> int:
        """Device memory held by this process."""

    def rng_state(self) -> Tensor:
        """State of the device's default generator."""

    def set_rng_state(self, state: Tensor) -> None: ...
