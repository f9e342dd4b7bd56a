"""`torch.compile` for regions: the peer that graphs and fused kernels are compared with.

What it makes may differ from eager in its bits; results of such stages are of the tier `compiled`. Whatever
goes wrong, the call runs eager and says why. Functions are compiled as copies of their own, so that code
made here is neither shared with nor dropped for others. Source: graph spec sections 11 and 14.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from accel.fusion.mounting import is_mounted
from accel.graphs.buffers import clone_layout
from accel.graphs.containment import describe
from accel.graphs.tree import map_tensors
from accel.policy import Compile, CompileScope, StagePolicy
from accel.record import Kind, Outcome, Reason, Tier

_log = logging.getLogger("samebit")

# Kinds of calls that one function is compiled for: a block serves several streams, stages and lengths.
RECOMPILE_LIMIT = 64
_BACKEND = "inductor"
_LISTS = (nn.ModuleList, nn.Sequential)
# Blocks that pipelines share have their compiled form for one region call at a time.
_exchanging = threading.RLock()

# A function with the arguments of a region; it also tells whether compiled code took part.
_Run = Callable[..., tuple[Any, bool]]


class CompiledStage:
    """What `torch.compile` makes for one stage.

    mode, scope: as `StagePolicy.compile` and `compile_scope`. modules: those of the stage.
    compile_ms: wall time of the attempts in which code was made or the compiler failed.
    tier: `exact` until a value comes from compiled code.
    """

    def __init__(self, *, mode: Compile, scope: CompileScope, modules: Iterable[nn.Module]) -> None:
        self.compile_ms = 0.0
        self.tier: Tier = "exact"
        self._mode = mode
        self._own: dict[FunctionType, FunctionType] = {}
        self._blocks = _Blocks(repeated_blocks(modules), self._compile) if scope == "regional" else None

    @classmethod
    def of(cls, policy: StagePolicy, modules: Callable[[], Mapping[str, nn.Module]]) -> CompiledStage | None:
        """What the policy asks for; `None` if that is no compilation."""
        if policy.compile is None or policy.compile_scope is None:
            return None
        return cls(mode=policy.compile, scope=policy.compile_scope, modules=modules().values())

    def region(self, fn: Callable[..., Any], *, name: str) -> CompiledRegion:
        """The compiled form of a bound method. name: "stage.region", for messages."""
        assert isinstance(fn, MethodType)
        run = self._whole(fn) if self._blocks is None else self._blocks.around(fn)
        return CompiledRegion(fn, run, name=name, stage=self)

    def close(self) -> None:
        """Drop the compiled code. Regions can still be called and compile anew."""
        for function in self._own.values():
            reset_code(function.__code__)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around one call of compiled code: too many recompilations raise, and compilations are timed."""
        graphs, started, failed = _graphs_made(), time.perf_counter(), True
        if self._mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            with torch._dynamo.config.patch(
                recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True
            ):
                yield
            failed = False
        finally:
            if failed or _graphs_made() != graphs:
                self.compile_ms += 1e3 * (time.perf_counter() - started)

    def kept(self, value: Any) -> Any:
        """A value that later calls leave alone: graphs of the mode `reduce-overhead` overwrite theirs."""
        return map_tensors(value, clone_layout) if self._mode == "reduce-overhead" else value

    def _whole(self, fn: MethodType) -> _Run:
        compiled, graphs = self._compile(fn), 0

        def run(*args: Any, **kwargs: Any) -> tuple[Any, bool]:
            nonlocal graphs
            before = _graphs_made()
            value = compiled(*args, **kwargs)
            graphs += _graphs_made() - before
            return value, graphs > 0

        return run

    def _compile(self, method: MethodType) -> Callable[..., Any]:
        """Methods of the same function share code, which is the stage's own."""
        function = method.__func__
        assert isinstance(function, FunctionType)
        own = self._own.setdefault(function, _copy(function))
        compiled: Callable[..., Any] = torch.compile(
            MethodType(own, method.__self__), backend=_BACKEND, mode=self._mode, dynamic=False
        )
        return compiled


class CompiledRegion:
    """One region. A compiler that failed is not asked again."""

    def __init__(self, fn: Callable[..., Any], run: _Run, *, name: str, stage: CompiledStage) -> None:
        self._fn = fn
        self._run = run
        self._name = name
        self._stage = stage
        self._failure: Outcome | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Outcome]:
        """The region's value and how it came about. Raises: what the region itself raises."""
        if self._failure is not None:
            return self._fn(*args, **kwargs), self._failure
        try:
            with self._stage.attempt():
                value, compiled = self._run(*args, **kwargs)
                value = self._stage.kept(value)
        except Exception as error:
            outcome = _refusal(error)
        else:
            if not compiled:
                return value, Outcome(Kind.EAGER, Reason.NOTHING_TO_COMPILE)
            self._stage.tier = "compiled"
            return value, Outcome(Kind.COMPILED)
        value = self._fn(*args, **kwargs)
        if outcome.reason is Reason.COMPILE_FAILED:
            self._failure = outcome
            _log.warning("%s: not compiled, runs %s: %s", self._name, outcome, outcome.detail)
        return value, outcome


def repeated_blocks(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks that a model stacks: entries of its module lists whose class occurs more than once.

    Of blocks within blocks the outer ones, and none without parts. Diffusers names the same blocks in
    `_repeated_blocks`.
    """
    layers: dict[nn.Module, None] = {}

    def collect(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, _LISTS) and not isinstance(child, _LISTS) and any(child.children()):
                layers[child] = None
            else:
                collect(child)

    for module in modules:
        collect(module)
    occurrences = Counter(map(type, layers))
    return [layer for layer in layers if occurrences[type(layer)] > 1]


class _Blocks:
    """Compiled forwards that stand in for those of the blocks while a region of the stage runs."""

    def __init__(
        self, blocks: Iterable[nn.Module], compile_method: Callable[[MethodType], Callable[..., Any]]
    ) -> None:
        self._calls = 0
        self._thread = 0
        self._forwards = {
            # The class's own forward: what is mounted on a block is the same computation in other words.
            block: self._standing_in(MethodType(type(block).forward, block), compile_method)
            for block in blocks
        }

    def around(self, fn: Callable[..., Any]) -> _Run:
        def run(*args: Any, **kwargs: Any) -> tuple[Any, bool]:
            with self._in_place():
                before = self._calls
                return fn(*args, **kwargs), self._calls > before

        return run

    def _standing_in(
        self, stock: MethodType, compile_method: Callable[[MethodType], Callable[..., Any]]
    ) -> Callable[..., Any]:
        compiled = compile_method(stock)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return stock(*args, **kwargs)  # of a pipeline that shares the model
            self._calls += 1
            return compiled(*args, **kwargs)

        return forward

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with _exchanging:
            self._thread = threading.get_ident()
            before = {
                block: vars(block).get("forward")
                for block, forward in self._forwards.items()
                if _is_stock(block) or vars(block).get("forward") is forward
            }
            try:
                for block in before:
                    vars(block)["forward"] = self._forwards[block]
                yield
            finally:
                for block, bound in before.items():
                    if bound is None:
                        del vars(block)["forward"]
                    else:
                        vars(block)["forward"] = bound


def _is_stock(block: nn.Module) -> bool:
    """Whether the block computes what its class says: hooks of libraries replace `forward` to change that."""
    return "forward" not in vars(block) or is_mounted(block)


def _copy(function: FunctionType) -> FunctionType:
    """The same function with a code object of its own, which is what compiled code is kept by."""
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _graphs_made() -> int:
    return counters["stats"]["unique_graphs"]


def _refusal(error: Exception) -> Outcome:
    if isinstance(error, torch.OutOfMemoryError):
        return Outcome(Kind.EAGER, Reason.OOM, describe(error))
    if isinstance(error, FailOnRecompileLimitHit):
        return Outcome(Kind.EAGER, Reason.RECOMPILE_LIMIT, f"{RECOMPILE_LIMIT} kinds of calls are compiled")
    message = " ".join(str(error).split())[:200]
    return Outcome(Kind.EAGER, Reason.COMPILE_FAILED, f"{type(error).__name__}: {message}")
