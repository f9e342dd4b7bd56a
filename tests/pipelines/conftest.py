"""A kernel on the CPU behind a fusion site, right or wrong."""

import pytest
import torch

from accel.fusion import registry
from accel.fusion.gate import Gate
from accel.fusion.site import Kernel, Site
from accel.record import Reason

OUTCOMES = {
    "right": (True, None),
    "one ulp off": (False, Reason.MISMATCH),
    "raising": (False, Reason.KERNEL_ERROR),
}


@pytest.fixture(params=OUTCOMES)
def kernel_behind(request, monkeypatch):
    """Puts a kernel behind the named site; returns (fused, reason) that its calls must report."""

    def install(name):
        reference = registry.get(name).reference

        def run(*args):
            if request.param == "raising":
                raise RuntimeError("no such layout")
            value = reference(*args)
            if request.param == "one ulp off":
                first = (value[0] if isinstance(value, tuple) else value).view(-1)
                first[0] = torch.nextafter(first[0], torch.tensor(torch.inf))
            return value

        site = Site(
            name=name,
            reference=reference,
            load=lambda: Kernel(plan=lambda *_: run),
            dtypes=(torch.float32,),
            devices=("cpu",),
        )
        gate, gate_of = Gate(site), registry.gate
        monkeypatch.setattr(registry, "gate", lambda asked: gate if asked == name else gate_of(asked))
        return OUTCOMES[request.param]

    return install
