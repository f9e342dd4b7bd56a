"""Kernels under the Triton interpreter."""

import sys
from collections import UserDict

import pytest

from accel.fusion import registry
from accel.fusion.compare import first_mismatch

PACKAGE = "accel.fusion.kernels."


class Kernels(UserDict):
    """Site name -> kernel, imported when asked for."""

    def __missing__(self, name):
        self[name] = registry.get(name).load()
        return self[name]


@pytest.fixture(scope="module")
def kernels():
    """Site name -> kernel, imported for the interpreter and forgotten afterwards."""
    triton = pytest.importorskip("triton")
    compiled = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(PACKAGE)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        yield Kernels()
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]
    sys.modules.update(compiled)


@pytest.fixture(scope="session")
def assert_equals_eager():
    """Assert that a kernel takes the arguments and gives every bit of the reference."""

    def check(kernel, reference, *args):
        assert kernel.refuses(*args) == ""
        mismatch = first_mismatch(reference(*args), kernel.run(*args))
        assert mismatch is None, str(mismatch)

    return check
