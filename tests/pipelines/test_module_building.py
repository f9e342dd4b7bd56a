"""Modules without initial weights, and synthetic weights for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel.errors import CheckpointError, DeviceMemoryError
from pipelines import synthetic_weights
from pipelines.module_building import allocate, build_modules, build_on_meta

CPU = torch.device("cpu")


class Network(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.statistics = nn.BatchNorm1d(width, affine=False)
        self.register_buffer("frequencies", torch.arange(4, dtype=torch.float) / 3, persistent=False)


def made(seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 64) -> Network:
    module = build_on_meta(lambda: Network(width), dtype=dtype)
    allocate(module, CPU)
    synthetic_weights.fill(module, seed=seed)
    assert isinstance(module, Network)
    return module


def test_parameters_wait_on_meta_and_buffers_are_real() -> None:
    module = build_on_meta(Network, dtype=torch.bfloat16)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert not nn.Linear(2, 2).weight.is_meta


def test_buffers_are_as_the_class_defines_them() -> None:
    module = made(dtype=torch.bfloat16)
    assert torch.equal(module.frequencies, torch.arange(4, dtype=torch.float32) / 3)
    assert torch.equal(module.statistics.running_var, torch.ones(64, dtype=torch.bfloat16))
    assert module.statistics.num_batches_tracked.item() == 0


def test_a_failing_class_leaves_torch_as_it_was() -> None:
    def fail() -> nn.Module:
        raise ValueError("no such network")

    with pytest.raises(ValueError, match="no such network"):
        build_on_meta(fail, dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert not nn.Linear(2, 2).weight.is_meta


def test_shared_parameters_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

    module = build_on_meta(Tied, dtype=torch.float32)
    assert [name for name, _ in module.named_parameters()] == ["embedding.weight"]
    allocate(module, CPU)
    assert [name for name, _ in module.named_parameters()] == ["embedding.weight"]
    assert module.head.weight is module.embedding.weight


def test_the_same_seed_gives_the_same_weights_whatever_is_beside_them() -> None:
    one, same, other = made(0), made(0), made(1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.linear.weight, other.linear.weight)
    lone = nn.ModuleDict({"linear": nn.Linear(64, 64)})
    synthetic_weights.fill(lone, seed=0)
    assert torch.equal(lone["linear"].weight, one.linear.weight)


def test_weights_keep_the_scale_of_what_passes_through() -> None:
    module = made(width=1024)
    assert 0.95 < module.linear.weight.std() * 32 < 1.05
    assert module.linear.bias.abs().max() < 0.1
    assert 0.98 < module.norm.weight.mean() < 1.02
    assert module.norm.weight.std() > 0.05


def test_modules_come_ready_for_inference_and_in_order() -> None:
    seen: list[str] = []

    def fill(name: str, module: nn.Module) -> None:
        seen.append(name)
        synthetic_weights.fill(module, seed=0)

    modules = build_modules({"a": Network, "b": Network}, fill=fill, dtype=torch.float32, device=CPU)
    assert seen == list(modules) == ["a", "b"]
    for module in modules.values():
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_checks_come_before_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.device_memory.free_bytes", lambda device: 1000)

    def fill(name: str, module: nn.Module) -> None:
        raise AssertionError("nothing may be allocated")

    def refuse(modules: object) -> None:
        raise CheckpointError("these do not belong together")

    with pytest.raises(CheckpointError, match="do not belong"):
        build_modules({"a": Network}, fill=fill, check=refuse, dtype=torch.float32, device=CPU)
    with pytest.raises(DeviceMemoryError, match="a "):
        build_modules({"a": Network}, fill=fill, dtype=torch.float32, device=CPU)
