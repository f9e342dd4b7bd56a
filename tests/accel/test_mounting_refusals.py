"""What keeps a class of blocks on its stock forward, and how it is said."""

import re
from types import SimpleNamespace

import pytest
import torch
from mounting_harness import (
    KNOWN,
    Block,
    ChangedBlock,
    Norm,
    OtherProcessor,
    Processor,
    Scale,
    arguments,
    examples,
    model_of,
    mount_on,
    raising_forward,
    wrong_forward,
)
from torch import nn

from accel.fusion.mounting import fingerprint, qualified_name
from accel.record import Reason


def assert_refused(model, reason, words, **changes):
    before = [dict(vars(module)) for module in model.modules()]
    report = mount_on(model, **changes).report
    assert (report.mounted, report.reason) == (False, reason)
    assert re.search(words, report.detail), report.detail
    assert [dict(vars(module)) for module in model.modules()] == before


# What differs from the code the forward was written for


def test_subclass_is_refused():
    assert_refused(
        model_of(Block(), ChangedBlock()), Reason.STRUCTURE_CHANGED, "^1 is a ChangedBlock, not a Block"
    )


def test_model_without_such_blocks_is_refused():
    assert_refused(model_of(nn.Linear(2, 2)), Reason.STRUCTURE_CHANGED, "Sequential has no Block")


def test_renamed_child_is_refused():
    model = model_of(Block())
    model[0].normalise = model[0].norm
    del model[0].norm
    assert_refused(model, Reason.STRUCTURE_CHANGED, "0.norm: 'Block' object has no attribute 'norm'")


def test_exchanged_child_is_refused():
    model = model_of(Block())
    model[0].norm = Scale()
    assert_refused(model, Reason.STRUCTURE_CHANGED, "0.norm is a Scale, not a Norm")


def test_other_processor_is_refused():
    model = model_of(Block())
    model[0].processor = OtherProcessor()
    assert_refused(model, Reason.STRUCTURE_CHANGED, "0.processor is a OtherProcessor, not a Processor")


def test_unknown_library_version_is_refused():
    assert_refused(
        model_of(Block()), Reason.STRUCTURE_CHANGED, "Block is not known in this version", known={}
    )


def test_changed_source_is_refused(monkeypatch):
    monkeypatch.setattr(Norm, "forward", lambda self, x: x)
    assert_refused(model_of(Block()), Reason.STRUCTURE_CHANGED, "Norm: what it computes was changed")


def test_changed_parameters_are_refused(monkeypatch):
    monkeypatch.setattr(Norm, "forward", lambda self, x, axis=-1: x)
    assert_refused(model_of(Block()), Reason.STRUCTURE_CHANGED, r"Norm takes \(x, axis\), not \(x\)")


def test_changed_constructor_is_refused(monkeypatch):
    monkeypatch.setattr(Processor, "__init__", lambda self: None)
    assert_refused(model_of(Block()), Reason.STRUCTURE_CHANGED, "Processor: its constructor was changed")


def test_changed_function_is_refused():
    known = {**KNOWN, qualified_name(arguments): fingerprint(examples)}
    assert_refused(
        model_of(Block()),
        Reason.STRUCTURE_CHANGED,
        r"arguments takes \(\), not \(block, draw\)",
        functions=(arguments,),
        known=known,
    )


def test_forward_with_other_bits_is_refused():
    assert_refused(
        model_of(Block()), Reason.MISMATCH, "0: output 0 at .*: expected 0x", forward=wrong_forward
    )


def test_forward_that_fails_is_refused():
    assert_refused(
        model_of(Block()),
        Reason.UNSUPPORTED_MODULE,
        "0: AttributeError: .*projection",
        forward=raising_forward,
    )


def test_forward_that_declines_its_example_is_refused():
    flat = [{"x": torch.ones(3, 4), "shift": torch.ones(3, 4), "scale": torch.ones(3, 4)}]
    assert_refused(model_of(Block()), Reason.MISMATCH, "1 tensors.*0 tensors", examples=lambda *_: flat)


# How a known block is set up


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("path", ["", "norm"])
def test_hooks_are_refused(register, path):
    model = model_of(Block())
    getattr(model[0].get_submodule(path), register)(lambda *_: None)
    assert_refused(model, Reason.FORWARD_HOOK, "forward hooks")


def test_another_forward_on_the_same_blocks_is_refused():
    model = model_of(Block())
    first = mount_on(model)
    assert_refused(
        model, Reason.FORWARD_HOOK, "0.forward was replaced on the instance", forward=raising_forward
    )
    first.unmount()
    assert mount_on(model).report.mounted


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (lambda model: model.train(), Reason.TRAINING_MODE, "^0"),
        (lambda model: model[0].project.train(), Reason.TRAINING_MODE, "0.project"),
        (lambda model: setattr(model, "gradient_checkpointing", True), Reason.GRAD_ENABLED, "checkpointing"),
        (lambda model: setattr(model[0].project, "_hf_hook", 1), Reason.COMPONENT_OFFLOADED, "0.project"),
        (
            lambda model: setattr(model[0].project, "_diffusers_hook", SimpleNamespace(hooks={"cast": 1})),
            Reason.COMPONENT_OFFLOADED,
            "0.project",
        ),
        (
            lambda model: setattr(model, "_parallel_config", SimpleNamespace()),
            Reason.MULTI_GPU,
            "^Sequential has a parallel_config",
        ),
        (lambda model: model.to("meta"), Reason.COMPONENT_OFFLOADED, "meta"),
        (lambda model: setattr(model[0].norm, "forward", None), Reason.FORWARD_HOOK, "0.norm.forward"),
        (lambda model: setattr(model[0], "fused_projections", True), Reason.UNSUPPORTED_MODULE, "fused"),
        (
            lambda model: setattr(model[0].processor, "_attention_backend", "flash"),
            Reason.UNSUPPORTED_MODULE,
            "backend flash",
        ),
        (
            lambda model: setattr(model[0].processor, "_parallel_config", SimpleNamespace()),
            Reason.MULTI_GPU,
            "parallel_config",
        ),
        (lambda model: setattr(model[0], "eps", 1.0), Reason.UNSUPPORTED_MODULE, "0: eps is 1.0"),
    ],
)
def test_setup_that_is_not_covered_is_refused(spoil, reason, words):
    model = model_of(Block())
    spoil(model)
    refuses = lambda block: f"eps is {block.eps}" if block.eps else ""  # noqa: E731
    assert_refused(model, reason, words, refuses=refuses)
