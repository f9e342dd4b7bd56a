"""Why a forward may not stand in for the stock one of some blocks, judged by looking at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from accel.forward_hooks import has_forward_hooks
from accel.fusion.mounting.block_forward import BlockForward, part_at
from accel.fusion.mounting.fingerprint import departure
from accel.record import Reason


class Refusal(NamedTuple):
    reason: Reason
    detail: str


def refusal_of(model: nn.Module, blocks: Mapping[str, nn.Module], fused: BlockForward) -> Refusal | None:
    """The first thing that stands against mounting; `None` if nothing does.

    blocks: name in the model -> block.
    """
    if not blocks:
        return Refusal(Reason.STRUCTURE_CHANGED, f"{type(model).__name__} has no {fused.name}")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return Refusal(Reason.GRAD_ENABLED, "gradient checkpointing is on")
    if any(getattr(module, "_parallel_config", None) is not None for module in model.modules()):
        return Refusal(Reason.MULTI_GPU, f"{type(model).__name__} has a parallel_config")
    changed = next(filter(None, (departure(code, fused.known) for code in fused.code)), "")
    if changed:
        return Refusal(Reason.STRUCTURE_CHANGED, changed)
    return next((refusal for name, block in blocks.items() for refusal in _against(name, block, fused)), None)


def _against(name: str, block: nn.Module, fused: BlockForward) -> Iterator[Refusal]:
    """Later checks rely on earlier ones, so only the first refusal means anything."""
    for path, allowed in {"": (fused.block,), **fused.parts}.items():
        yield from _against_part(f"{name}.{path}".strip("."), block, path, allowed)
    yield from _against_weights(name, block)
    unsupported = fused.refuses(block)
    if unsupported:
        yield Refusal(Reason.UNSUPPORTED_MODULE, f"{name}: {unsupported}")


def _against_part(where: str, block: nn.Module, path: str, allowed: tuple[type, ...]) -> Iterator[Refusal]:
    """Another class, or settings under which calling the part means more than its own source says."""
    try:
        part = part_at(block, path) if path else block
    except AttributeError as error:
        yield Refusal(Reason.STRUCTURE_CHANGED, f"{where}: {error}")
        return
    if type(part) not in allowed:
        names = " or ".join(each.__name__ for each in allowed)
        yield Refusal(Reason.STRUCTURE_CHANGED, f"{where} is a {type(part).__name__}, not a {names}")
    if isinstance(part, nn.Module):
        if has_forward_hooks(part):
            yield Refusal(Reason.FORWARD_HOOK, f"{where} has forward hooks")
        if "forward" in vars(part):
            yield Refusal(Reason.FORWARD_HOOK, f"{where}.forward was replaced on the instance")
    if getattr(part, "fused_projections", False):
        yield Refusal(Reason.UNSUPPORTED_MODULE, f"{where}: its projections are fused")
    if getattr(part, "_parallel_config", None) is not None:
        yield Refusal(Reason.MULTI_GPU, f"{where} has a parallel_config")
    if getattr(part, "_attention_backend", None) is not None:
        yield Refusal(Reason.UNSUPPORTED_MODULE, f"{where}: attention backend {part._attention_backend}")


def _against_weights(name: str, block: nn.Module) -> Iterator[Refusal]:
    """Modules that move or cast their weights, train, or hold them where the block can't be run."""
    for where, module in block.named_modules(prefix=name):
        if hasattr(module, "_hf_hook") or getattr(getattr(module, "_diffusers_hook", None), "hooks", None):
            yield Refusal(Reason.COMPONENT_OFFLOADED, f"{where} has a hook that moves or casts weights")
        if module.training:
            yield Refusal(Reason.TRAINING_MODE, where)
    devices = {weight.device: where for where, weight in block.named_parameters(prefix=name)}
    if len(devices) != 1 or any(device.type == "meta" for device in devices):
        where = ", ".join(f"{where} on {device}" for device, where in devices.items())
        yield Refusal(Reason.COMPONENT_OFFLOADED, where or f"{name} has no weights")
