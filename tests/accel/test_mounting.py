"""Mounting a forward on blocks: what it leaves behind, and what happens when blocks change later."""

import copy
import functools
import gc
import logging
import weakref
from contextlib import nullcontext

import pytest
import torch
from mounting_harness import (
    SITES,
    Block,
    ChangedBlock,
    OtherProcessor,
    Processor,
    Scale,
    arguments,
    description,
    model_of,
    mount_on,
)
from torch import nn

from accel.errors import SamebitError
from accel.fusion.mounting import MountReport, fingerprint, minor_version, mount, qualified_name
from accel.fusion.scope import fusion_scope
from accel.record import Reason


def test_mounted_blocks_call_their_sites_with_the_bits_of_stock():
    model = model_of(Block(), Block())
    expected = [block(*arguments()) for block in model]
    mounted = mount_on(model)
    assert mounted.report == MountReport("Block", 2, mounted=True)
    outcomes = []
    with fusion_scope(SITES, outcomes.append):
        actual = [block(*arguments()) for block in model]
    assert all(map(torch.equal, actual, expected))
    assert [(outcome.site, outcome.reason) for outcome in outcomes] == [("modulate", Reason.NO_CUDA)] * 2


@pytest.mark.parametrize("allowed", [None, frozenset(), frozenset({"swiglu"})])
def test_outside_a_scope_for_its_sites_the_stock_forward_runs(allowed, monkeypatch):
    model = model_of(Block())
    mount_on(model)
    calls = []
    monkeypatch.setattr(Processor, "__call__", lambda self, block, x: calls.append(x) or block.project(x))
    with nullcontext() if allowed is None else fusion_scope(allowed, calls.append):
        model[0](*arguments())
    assert len(calls) == 1


def test_pipelines_that_share_a_model_share_its_mounts():
    model = model_of(Block())
    first, second = mount_on(model), mount_on(model)
    assert first.report == second.report == MountReport("Block", 1, mounted=True)
    first.unmount()
    first.unmount()
    assert "forward" in vars(model[0])
    second.unmount()
    assert "forward" not in vars(model[0])
    assert mount_on(model).report.mounted


def test_a_mounted_model_is_freed_when_nobody_holds_it():
    model = model_of(Block())
    mounted, block = mount_on(model), weakref.ref(model[0])
    del model, mounted
    gc.collect()
    assert block() is None


def test_unmounting_leaves_no_trace():
    model = model_of(Block())
    block, processor = model[0], model[0].processor
    attributes = dict(vars(block))
    mounted = mount_on(model)
    assert "forward" in vars(block)
    for _ in range(2):
        mounted.unmount()
        assert vars(block) == attributes
    assert block.forward.__func__ is Block.forward
    assert block.processor is processor


def test_a_forward_replaced_after_mounting_is_not_lost():
    model = model_of(Block(), Block())
    mounted = mount_on(model)
    ours, theirs = model[0].forward, lambda *args: None
    model[1].forward = theirs
    with pytest.raises(SamebitError, match=r"Block\.forward was replaced after mounting"):
        mounted.unmount()
    assert model[1].forward is theirs
    assert model[0].forward == ours


@pytest.mark.parametrize("wrap", [functools.partial, lambda fn: lambda *args: fn(*args)])
def test_a_hook_that_wraps_the_mounted_forward_is_not_lost(wrap):
    """Libraries of hooks copy the attributes of the function they wrap, with `functools.update_wrapper`."""
    model = model_of(Block())
    mounted, ours = mount_on(model), model[0].forward
    model[0].forward = hook = functools.update_wrapper(wrap(ours), ours)
    assert mount_on(model).report.reason is Reason.FORWARD_HOOK
    with pytest.raises(SamebitError, match=r"Block\.forward was replaced after mounting"):
        mounted.unmount()
    assert model[0].forward is hook
    model[0].forward = ours
    mounted.unmount()
    assert "forward" not in vars(model[0])


def test_a_copy_of_a_mounted_model_is_a_model_of_its_own():
    model = model_of(Block())
    original, block = mount_on(model), weakref.ref(model[0])
    twin = copy.deepcopy(model)
    twin[0].project.weight.mul_(2)
    with fusion_scope(SITES, lambda outcome: None):
        assert torch.equal(twin[0](*arguments()), Block.forward(twin[0], *arguments()))
    mounted = mount_on(twin)
    assert mounted.report.mounted
    outcomes = []
    with fusion_scope(SITES, outcomes.append):
        twin[0](*arguments())
    assert len(outcomes) == 1
    del model, original
    gc.collect()
    assert block() is None
    mounted.unmount()
    assert "forward" not in vars(twin[0])


def test_mounting_that_raises_leaves_no_trace():
    def out_of_memory(block, draw):
        raise torch.OutOfMemoryError("no room")

    class Other(nn.Linear):
        pass

    model = model_of(Block(), Other(4, 4))
    known = {qualified_name(Other): fingerprint(Other)}
    other = description(block=Other, parts={}, known=known, examples=out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        mount(model, [description(), other], allowed=SITES)
    assert "forward" not in vars(model[0])


def test_mounting_draws_from_no_generator_of_the_user():
    model = model_of(Block())
    state = torch.get_rng_state()
    mount_on(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_mounted_where_no_site_is_allowed(caplog):
    model = model_of(Block())
    with caplog.at_level(logging.WARNING, "samebit"):
        (only,) = mount(model, [description()], allowed=frozenset({"swiglu"}))
    assert only.report == MountReport("Block", 1, False, Reason.DISABLED, "none of its sites is allowed")
    assert "forward" not in vars(model[0])
    assert not caplog.records
    only.unmount()


def test_refusal_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "samebit"):
        mount_on(model_of(ChangedBlock()))
    assert "Block keeps its stock forward (structure_changed): 0 is a ChangedBlock" in caplog.text


def test_hook_on_a_module_that_is_called_is_none_of_its_business():
    model, seen = model_of(Block()), []
    model[0].project.register_forward_hook(lambda *_: seen.append(1))
    assert mount_on(model).report.mounted
    seen.clear()
    outcomes = []
    with fusion_scope(SITES, outcomes.append):
        model[0](*arguments())
    assert seen == [1]
    assert len(outcomes) == 1


def test_wrapped_projection_is_called():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x) + x

    model = model_of(Block())
    model[0].project = Adapter(model[0].project).eval()
    expected = model[0](*arguments())
    assert mount_on(model).report.mounted
    outcomes = []
    with fusion_scope(SITES, outcomes.append):
        assert torch.equal(model[0](*arguments()), expected)
    assert len(outcomes) == 1


# What happens to mounted blocks later


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "processor", OtherProcessor()),
        lambda block: setattr(block, "norm", Scale()),
        lambda block: setattr(block.norm, "forward", lambda x: x + 1),
        lambda block: setattr(block.norm, "fused_projections", True),
        lambda block: block.norm.register_forward_hook(lambda module, args, output: output + 1),
        lambda block: block.norm.register_forward_pre_hook(lambda module, args: (args[0] ** 2,)),
    ],
    ids=["processor", "child", "forward", "projections", "hook", "pre-hook"],
)
def test_change_after_mounting_brings_the_stock_forward_back(change):
    model, twin = model_of(Block()), model_of(Block())
    twin.load_state_dict(model.state_dict())
    mount_on(model)
    change(model[0])
    change(twin[0])
    outcomes = []
    with fusion_scope(SITES, outcomes.append):
        actual = model[0](*arguments())
    assert torch.equal(actual, twin[0](*arguments()))
    assert [(outcome.site, outcome.reason) for outcome in outcomes] == [
        ("modulate", Reason.UNSUPPORTED_MODULE)
    ]


def test_declined_arguments_run_the_stock_forward():
    model = model_of(Block())
    flat = [tensor[0] for tensor in arguments()]
    expected = model[0](*flat)
    mount_on(model)
    outcomes = []
    with fusion_scope(SITES, outcomes.append):
        assert torch.equal(model[0](*flat), expected)
    assert [outcome.reason for outcome in outcomes] == [Reason.UNSUPPORTED_INPUT]


def test_weights_loaded_after_mounting_are_used():
    model, twin = model_of(Block()), model_of(Block())
    mount_on(model)
    model.load_state_dict(twin.state_dict())
    outcomes = []
    with fusion_scope(SITES, outcomes.append):
        assert torch.equal(model[0](*arguments()), twin[0](*arguments()))
    assert len(outcomes) == 1


def test_gradients_are_those_of_the_stock_forward():
    model = model_of(Block())
    x, *modulation = arguments()
    expected = torch.autograd.grad(model[0](x.requires_grad_(), *modulation).sum(), x)[0]
    mount_on(model)
    with fusion_scope(SITES, lambda outcome: None):
        actual = torch.autograd.grad(model[0](x, *modulation).sum(), x)[0]
    assert torch.equal(actual, expected)


def test_compiler_sees_the_stock_forward():
    model = model_of(Block())
    expected = model[0](*arguments())
    mount_on(model)
    outcomes = []
    with fusion_scope(SITES, outcomes.append):
        actual = torch.compile(model[0], backend="eager", fullgraph=True)(*arguments())
    assert torch.equal(actual, expected)
    assert not outcomes


def test_minor_version():
    assert minor_version("0.42.1") == minor_version("0.42.0.dev0") == "0.42"
