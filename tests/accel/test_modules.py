"""Every way in which a stage's modules can change is noticed at the next call."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from accel.graphs.modules import ModuleWatch
from accel.record import Reason

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.linear = nn.Linear(2, 2)
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("nothing", None)


def net() -> nn.Sequential:
    return (
        nn.Sequential(Block(), nn.Sequential(Block(), nn.GELU()), nn.ModuleDict())
        .requires_grad_(False)
        .eval()
    )


def inner(root: nn.Sequential) -> Block:
    block = root[1][0]
    assert isinstance(block, Block)
    return block


def parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "an equal parameter of one element": lambda m: setattr(inner(m), "scale", parameter(torch.ones(1))),
    "an equal parameter of many": lambda m: setattr(
        inner(m).linear, "weight", parameter(inner(m).linear.weight.clone())
    ),
    "past the setter": lambda m: inner(m)._parameters.update(scale=parameter(torch.ones(1))),
    "another shape": lambda m: setattr(inner(m).linear, "weight", parameter(torch.ones(3, 3))),
    "a buffer": lambda m: setattr(inner(m), "shift", torch.zeros(())),
    "a buffer where None was": lambda m: setattr(inner(m), "nothing", torch.zeros(1)),
    "None where a buffer was": lambda m: setattr(inner(m), "shift", None),
    "a new buffer": lambda m: inner(m).linear.register_buffer("extra", torch.zeros(1)),
    "a first buffer": lambda m: m[2].register_buffer("extra", torch.zeros(1)),
    "a parameter less": lambda m: delattr(inner(m).linear, "bias"),
    "a submodule": lambda m: setattr(inner(m), "linear", nn.Linear(2, 2).requires_grad_(False).eval()),
    "a first submodule": lambda m: m[2].update({"adapter": nn.Identity().eval()}),
    "one more layer": lambda m: m.append(nn.Identity().eval()),
    "other data": lambda m: setattr(inner(m).linear.bias, "data", torch.zeros(2)),
    "another dtype": lambda m: m.double(),
    "loaded by assignment": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_moves_the_epoch_once(what: str) -> None:
    root = net()
    watch = ModuleWatch(lambda: {"net": root}, CPU)
    assert watch.refusal() is None
    assert watch.epoch == 0
    CHANGES[what](root)
    assert watch.refusal() is None
    assert watch.refusal() is None
    assert watch.epoch == 1


def test_copies_into_weights_are_no_change() -> None:
    root = net()
    watch = ModuleWatch(lambda: {"net": root}, CPU)
    root.load_state_dict({k: v + 1 for k, v in root.state_dict().items()})
    inner(root).scale.mul_(2)
    assert watch.refusal() is None
    assert watch.epoch == 0


def test_another_root_is_a_change() -> None:
    roots = {"net": net()}
    watch = ModuleWatch(lambda: roots, CPU)
    roots["net"] = net()
    watch.refusal()
    roots["text"] = net()
    watch.refusal()
    assert watch.epoch == 2


def test_tied_weights_are_weights_once() -> None:
    root = net()
    inner(root).linear.weight = root[0].linear.weight
    watch = ModuleWatch(lambda: {"net": root}, CPU)
    assert watch.is_weight(root[0].linear.weight)
    assert not watch.is_weight(torch.ones(2, 2))


def test_memory_of_weights_can_be_kept_while_they_move() -> None:
    root, array = net(), np.zeros((2, 2), np.float32)
    inner(root).linear.weight.data, alive = torch.from_numpy(array), weakref.ref(array)
    del array
    watch = ModuleWatch(lambda: {"net": root}, CPU)
    kept = watch.memory()
    inner(root).linear.weight.data = torch.ones(2, 2)
    assert alive() is not None
    kept.clear()
    assert alive() is None


def test_hooks_training_and_grad_are_named() -> None:
    root = net()
    watch = ModuleWatch(lambda: {"net": root}, CPU)

    def refusal() -> tuple[Reason | None, str] | None:
        outcome = watch.refusal()
        return None if outcome is None else (outcome.reason, outcome.detail)

    handle = inner(root).linear.register_forward_pre_hook(lambda *_: None)
    assert refusal() == (Reason.FORWARD_HOOK, "net.1.0.linear")
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert refusal() == (Reason.FORWARD_HOOK, "all modules")
    handle.remove()
    inner(root).train()
    assert refusal() == (Reason.TRAINING_MODE, "net.1.0")
    root.eval()
    assert refusal() is None
    inner(root).scale.requires_grad_()
    assert refusal() == (Reason.GRAD_ENABLED, "weights require grad; call under torch.no_grad()")
    with torch.no_grad():
        assert refusal() is None
    assert watch.epoch == 0
