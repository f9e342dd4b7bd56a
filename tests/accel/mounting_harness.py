"""A block with everything that mounting looks at, and a forward for it."""

import torch
from torch import nn

from accel.fusion import modulate
from accel.fusion.mounting import BlockForward, fingerprint, mount, qualified_name

SITES = frozenset({"modulate"})


class Norm(nn.Module):
    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


class Scale(nn.Module):
    def forward(self, x):
        return x * 2


class Processor:
    _attention_backend = None
    _parallel_config = None

    def __init__(self):
        self.calls = 0

    def __call__(self, block, x):
        return block.project(x)


class OtherProcessor(Processor):
    pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.project = nn.Linear(4, 4)
        self.processor = Processor()
        self.eps = 0.0

    def forward(self, x, shift, scale):
        return self.processor(self, (1 + scale) * self.norm(x) + shift)


class ChangedBlock(Block):
    def forward(self, x, shift, scale):
        return super().forward(x, shift, scale) + 1


def fused_forward(block, x, shift, scale):
    if x.dim() != 3:
        return NotImplemented
    return block.project(modulate(x - x.mean(-1, keepdim=True), shift, scale))


def wrong_forward(block, x, shift, scale):
    return fused_forward(block, x, shift, scale) * (1 + 2**-20)


def raising_forward(block, x, shift, scale):
    return block.projection(x)


def examples(block, draw):
    return [{"x": draw(2, 3, 4), "shift": draw(2, 1, 4), "scale": draw(2, 1, 4)}]


KNOWN = {qualified_name(code): fingerprint(code) for code in (Block, Norm, Processor)}


def description(**changes):
    fields = {
        "block": Block,
        "forward": fused_forward,
        "sites": SITES,
        "parts": {"norm": (Norm,), "processor": (Processor,)},
        "known": KNOWN,
        "examples": examples,
    }
    return BlockForward(**{**fields, **changes})


def model_of(*blocks):
    return nn.Sequential(*blocks).eval().requires_grad_(False)


def arguments():
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 5, 4), (2, 1, 4), (2, 1, 4))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def mount_on(model, **changes):
    (only,) = mount(model, [description(**changes)], allowed=SITES)
    return only
