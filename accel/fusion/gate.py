"""The gate: a fused kernel runs only after it has shown the bits of its reference on this device.

State of a call, first match wins                        | what runs
gate disabled; grad wanted; traced; arguments not served | reference
signature verified                                       | kernel
signature new, stream capturing or memory short          | reference, signature stays new
signature new                                            | both, and the stress vectors; any difference
                                                         | disables the whole gate
Source: fusion spec section 6.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from accel.fusion.compare import Mismatch, first_mismatch, tensors_of
from accel.fusion.signature import layout_of, signature_of
from accel.fusion.site import Kernel, Site
from accel.fusion.stress import distinct, stress_calls
from accel.record import Reason, SiteOutcome

_log = logging.getLogger("samebit")
_MAX_LAYOUTS = 4096  # and signatures; numbers that a request brings are part of both


class _Epoch:
    """Counts the gates that were switched off, so that graphs holding their kernels can be dropped."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def bump(self) -> None:
        with self._lock:
            self.value += 1


_epoch = _Epoch()


def fusion_epoch() -> int:
    """Grows whenever a gate is disabled: a graph captured before may replay the kernel it distrusts.

    Verifying a signature changes no graph that exists: what was fused in it stays fused, and what
    ran as the reference keeps the same bits.
    """
    return _epoch.value


@dataclass(frozen=True)
class Repro:
    """Where a kernel departed from its reference: the call's signature, and index and values in hex."""

    signature: Hashable
    mismatch: Mismatch


@dataclass(frozen=True)
class GateStats:
    """What one gate did since the process started.

    calls: calls by the reason for the reference; fused calls under `None`.
    verified: signatures now known. verify_ms: wall time of all verification.
    """

    calls: dict[Reason | None, int]
    verified: int
    repro: Repro | None
    verify_ms: float


class Gate:
    """Decides for every call of one site between its kernel and its reference."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = threading.RLock()  # a verification that fails switches the gate off
        self._verified: set[Hashable] = set()
        self._disabled: SiteOutcome | None = None
        self._import_error = ""
        self._repro: Repro | None = None
        self._verify_ms = 0.0
        self._refused: dict[Hashable, SiteOutcome] = {}
        self._plans: dict[Hashable, Callable[..., Any]] = {}
        self._calls: Counter[Reason | None] = Counter()
        self._fused = SiteOutcome(site.name, fused=True)

    def run(self, *args: Any, fallback: Callable[..., Any] | None = None) -> tuple[Any, SiteOutcome]:
        """The site's value, bit for bit that of the reference, and how it came about.

        fallback: what to run where the kernel may not, by default the reference; it has the same bits.
        Raises: what the fallback raises, out of memory, and errors that leave the CUDA context unusable.
        """
        value, outcome = self._decide(args, fallback or self.site.reference)
        self._calls[outcome.reason] += 1
        return value, outcome

    def stats(self) -> GateStats:
        return GateStats(dict(self._calls), len(self._verified), self._repro, self._verify_ms)

    def _decide(self, args: tuple[Any, ...], fallback: Callable[..., Any]) -> tuple[Any, SiteOutcome]:
        refusal = self._disabled or self._momentary_refusal(args)
        if refusal is not None:
            return fallback(*args), refusal
        layout = layout_of(args)
        plan = self._plans.get(layout)
        if plan is not None:
            return self._run_kernel(plan, args, fallback)
        refusal = self._refused.get(layout)
        return (fallback(*args), refusal) if refusal is not None else self._run_new(layout, args, fallback)

    def _momentary_refusal(self, args: tuple[Any, ...]) -> SiteOutcome | None:
        """What the state of the thread forbids, whatever the arguments look like."""
        first = args[0]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(args)):
            return self._outcome(Reason.GRAD_ENABLED)
        if _is_traced(first):
            return self._outcome(Reason.TRACING, "compiler, tracer or functorch transform")
        if first.is_cuda and torch.is_autocast_enabled("cuda"):
            return self._outcome(Reason.UNSUPPORTED_INPUT, "autocast is active")
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            return self._outcome(Reason.UNSUPPORTED_INPUT, f"{first.device} is not the current device")
        return None

    def _lasting_refusal(self, args: tuple[Any, ...]) -> SiteOutcome | None:
        """What no later call with this layout can get either."""
        tensors = list(tensors_of(args))
        if tensors[0].device.type not in self.site.devices:
            return self._outcome(Reason.NO_CUDA, f"tensors on {tensors[0].device}")
        if self._kernel is None:
            return self._outcome(Reason.NO_TRITON, f"{self._import_error}; install the `kernels` extra")
        unsupported = self.site.refuses(tensors) or self._kernel.refuses(*args)
        return self._outcome(Reason.UNSUPPORTED_INPUT, unsupported) if unsupported else None

    def _run_new(
        self, layout: Hashable, args: tuple[Any, ...], fallback: Callable[..., Any]
    ) -> tuple[Any, SiteOutcome]:
        """A layout not seen before: refuse it, or file it under a signature that is or gets verified."""
        refusal = self._lasting_refusal(args)
        if refusal is not None:
            _remember(self._refused, layout, refusal)
            return fallback(*args), refusal
        signature = signature_of(args)
        if signature in self._verified:
            return self._run_kernel(partial(self._run_planned, layout), args, fallback)
        if _is_capturing(args):
            return fallback(*args), self._outcome(Reason.UNVERIFIED, "first call is in a capture")
        return self._run_first(signature, args)

    def _run_planned(self, layout: Hashable, *args: Any) -> Any:
        """Run the kernel by a new plan, which is kept for later calls of this layout."""
        assert self._kernel is not None
        plan = self._kernel.plan(*args)
        value = plan(*args)
        _remember(self._plans, layout, plan)
        return value

    def _run_kernel(
        self, run: Callable[..., Any], args: tuple[Any, ...], fallback: Callable[..., Any]
    ) -> tuple[Any, SiteOutcome]:
        try:
            return run(*args), self._fused
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            outcome = self._disable_after(error)
        return fallback(*args), outcome

    def _run_first(self, signature: Hashable, args: tuple[Any, ...]) -> tuple[Any, SiteOutcome]:
        """Reference first, so that nothing the kernel does can touch the value returned."""
        expected = self.site.reference(*args)
        if not _has_room_for(expected):
            return expected, self._outcome(Reason.LOW_MEMORY)
        with self._lock:  # another thread may have got here first
            if self._disabled is None and signature not in self._verified:
                return expected, self._verify(signature, args, expected)
        return expected, self._disabled or self._fused

    def _verify(self, signature: Hashable, args: tuple[Any, ...], expected: Any) -> SiteOutcome:
        started = time.perf_counter()
        try:
            mismatch = self._judge(args, expected)
        except torch.OutOfMemoryError:
            return self._outcome(Reason.LOW_MEMORY)
        except Exception as error:
            return self._disable_after(error)
        finally:
            self._verify_ms += 1e3 * (time.perf_counter() - started)
        if mismatch is not None:
            self._repro = Repro(signature, mismatch)
            return self._disable(Reason.MISMATCH, str(mismatch))
        if len(self._verified) >= _MAX_LAYOUTS:
            self._verified.clear()
        self._verified.add(signature)
        return self._fused

    def _judge(self, args: tuple[Any, ...], expected: Any) -> Mismatch | None:
        """The first mismatch on the call itself, the stress vectors or the exhaustive proof."""
        mismatch = self._mismatch(args, expected)
        calls = self._test_calls(args)
        while mismatch is None and (call := next(calls, None)) is not None:
            mismatch = self._mismatch(call, self.site.reference(*call))
        return mismatch

    def _test_calls(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        assert self._kernel is not None
        yield from stress_calls(self._kernel.shorten(*args))
        if self._kernel.proof is not None:
            first = next(tensors_of(args))
            yield self._kernel.proof(first.dtype, first.device)

    def _mismatch(self, args: tuple[Any, ...], expected: Any) -> Mismatch | None:
        """Run the kernel and compare outputs and inputs; inputs it wrote to are put back."""
        assert self._kernel is not None
        inputs = [distinct(tensor) for tensor in tensors_of(args)]
        before = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
        try:
            actual = self._kernel.run(*args)
        finally:
            written = first_mismatch(before, [tensor.contiguous() for tensor in inputs], what="input")
            if written is not None:
                for tensor, saved in zip(inputs, before, strict=True):
                    tensor.copy_(saved)
        return written or first_mismatch(expected, actual)

    def _disable_after(self, error: Exception) -> SiteOutcome:
        _reraise_if_context_lost(error)
        return self._disable(Reason.KERNEL_ERROR, f"{type(error).__name__}: {error}", error)

    def _disable(self, reason: Reason, detail: str, error: Exception | None = None) -> SiteOutcome:
        with self._lock:
            if self._disabled is None:  # else another thread failed just before
                self._disabled = self._outcome(reason, detail)
                _epoch.bump()
                _log.warning(
                    "fused kernel '%s' is switched off for this process (%s): %s. "
                    "The plain expression runs instead.",
                    self.site.name,
                    reason,
                    detail,
                    exc_info=error,
                )
            return self._disabled

    def _outcome(self, reason: Reason, detail: str = "") -> SiteOutcome:
        return SiteOutcome(self.site.name, fused=False, reason=reason, detail=detail)

    @cached_property
    def _kernel(self) -> Kernel | None:
        try:
            return self.site.load()
        except ImportError as error:
            self._import_error = str(error)
            return None


def _remember(known: dict[Hashable, Any], layout: Hashable, value: Any) -> None:
    if len(known) >= _MAX_LAYOUTS:
        known.clear()
    known[layout] = value


def _is_traced(first: Tensor) -> bool:
    """Whether what runs is to be written down as operators of torch, which a kernel's launch is not."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
        or get_proxy_mode() is not None
        or isinstance(first, FakeTensor)
    )


def _is_capturing(args: tuple[Any, ...]) -> bool:
    return next(tensors_of(args)).is_cuda and torch.cuda.is_current_stream_capturing()


def _has_room_for(expected: Any) -> bool:
    """Verification keeps copies; leave three times the output free."""
    outputs = list(tensors_of(expected))
    if not outputs or not outputs[0].is_cuda:
        return True
    device = outputs[0].device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached >= 3 * sum(output.nbytes for output in outputs)


def _reraise_if_context_lost(error: Exception) -> None:
    """After an illegal access nothing on the device can be trusted, the reference included."""
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return
    try:
        torch.cuda.synchronize()
    except Exception:
        raise error from None
