"""What adapter layers keep outside their weights decides which graph may serve, as the weights do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_harness import Harness
from torch import Tensor, nn

from accel.record import Kind

X = torch.arange(6.0).view(2, 3)


class LoraLinear(nn.Module):
    """As PEFT's layers: scales by adapter, which are active, whether any is, and which are merged."""

    _disable_adapters = False  # of the class until it is set, as there

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.lora = nn.ModuleDict({name: nn.Linear(3, 3) for name in "ab"})
        self.scaling = {"a": 0.5, "b": 2.0}
        self._active_adapter: str | list[str] = ["a"]
        self.merged_adapters: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if not self._disable_adapters:
            for name in self._active_adapter:
                y = y + self.scaling[name] * self.lora[name](x)
        return y


CHANGES: dict[str, Callable[[LoraLinear], object]] = {
    "a scale": lambda layer: layer.scaling.update(a=0.25),
    "other scales": lambda layer: setattr(layer, "scaling", {"a": 3.0, "b": 1.0}),
    "another adapter": lambda layer: setattr(layer, "_active_adapter", "b"),
    "one more adapter, in the same list": lambda layer: list.append(layer._active_adapter, "b"),  # type: ignore[arg-type]
    "no adapter": lambda layer: setattr(layer, "_disable_adapters", True),
}


@pytest.mark.parametrize("what", CHANGES)
@torch.no_grad()
def test_a_change_is_noticed_at_the_next_call(what: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), LoraLinear()).eval().requires_grad_(False)
    layer = net[1]
    assert isinstance(layer, LoraLinear)
    run = Harness(lambda x: net(x), modules=lambda: {"net": net})
    for _ in range(3):
        assert torch.equal(run(X), net(X))
    assert run.outcome.kind is Kind.REPLAYED
    CHANGES[what](layer)
    assert torch.equal(run(X), net(X))
    assert run.outcome.kind is Kind.CAPTURED
    for _ in range(2):
        assert torch.equal(run(X), net(X))
        assert run.outcome.kind is Kind.REPLAYED


@torch.no_grad()
def test_a_merge_moves_the_epoch_though_weights_are_changed_in_place() -> None:
    layer = LoraLinear().eval().requires_grad_(False)
    run = Harness(lambda x: layer(x), modules=lambda: {"layer": layer})
    run(X)
    layer.merged_adapters.append("a")
    run(X)
    assert run.outcome.kind is Kind.CAPTURED
