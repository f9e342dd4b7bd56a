"""Launches by a plan, on a driver that compiles for a GPU and runs nothing."""

import gc
import itertools
import weakref

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 - only where triton is
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from accel.fusion.gate import Gate  # noqa: E402
from accel.fusion.launch import Launch, allocator  # noqa: E402
from accel.fusion.site import Kernel, Site  # noqa: E402
from accel.site_names import SITE_NAMES  # noqa: E402


@triton.jit
def _scale_kernel(out, x, y, length, factor, has_y: tl.constexpr, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + index, mask=index < length) * factor
    if has_y:
        value += tl.load(y + index, mask=index < length)
    tl.store(out + index, value, mask=index < length)


class Recording:
    """A driver for sm_90. launched: grid, stream and kernel arguments of every launch."""

    def __init__(self):
        self.launched = []
        self.loaded = 0
        self.stream = 7
        self.utils = self

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, *rest):
            addresses = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in rest[4:]]
            self.launched.append(((x, y, z), stream, addresses))

        return launch

    def load_binary(self, name, kernel, shared, device):
        self.loaded += 1
        return "module", "function", 0, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 2**20}

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return self.stream

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def recording(monkeypatch):
    fake = Recording()
    monkeypatch.setattr(driver, "_active", fake)
    _scale_kernel.device_caches.clear()
    yield fake
    _scale_kernel.device_caches.clear()


def test_a_launch_passes_what_tritons_own_does(recording):
    out, x, y = (torch.ones(100) for _ in range(3))
    for second, has_y in ((y, True), (None, False)):
        options = {"num_warps": 4, "enable_fp_fusion": False}
        _scale_kernel[(4,)](out, x, second, 100, 2.5, has_y=has_y, block=32, **options)
        launch = Launch(_scale_kernel, (4,), 100, 2.5, block=32, has_y=has_y)
        for _ in range(2):
            launch(out, x, second)
        theirs, *ours = recording.launched[-3:]
        assert ours == [theirs, theirs]
    assert recording.loaded == 2, "both share the compiled kernels"


def test_a_launch_goes_to_the_stream_that_is_current_then(recording):
    launch = Launch(_scale_kernel, (4, 2), 100, 2.5, has_y=False, block=32)
    for stream in (7, 8):
        recording.stream = stream
        launch(torch.ones(100), torch.ones(100), None)
    assert [(grid, stream) for grid, stream, _ in recording.launched] == [((4, 2, 1), 7), ((4, 2, 1), 8)]


def test_an_allocator_makes_what_empty_does():
    for shape in ((), (3,), (0, 4), (2, 1, 5)):
        made = allocator(shape, torch.bfloat16, torch.device("cpu"))()
        like = torch.empty(shape, dtype=torch.bfloat16)
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
        assert made.is_contiguous()


def test_a_gate_plans_once_per_layout():
    """And a number is part of the layout, with the sign of zero: the plan has it built in."""
    planned = []

    def plan(x, factor):
        planned.append((tuple(x.shape), repr(factor)))
        return lambda x, _: x * factor

    site = Site(
        name="scaled",
        reference=lambda x, factor: x * factor,
        load=lambda: Kernel(plan=plan),
        dtypes=(torch.float32,),
        devices=("cpu",),
    )
    gate = Gate(site)
    for factor in (2.0, 0.0, -0.0):
        gate.run(torch.ones(3, 4), factor)
    planned.clear()
    for length, factor in itertools.product((5, 6, 5, 6), (2.0, 0.0, -0.0)):
        value, outcome = gate.run(torch.ones(length, 4), factor)
        assert outcome.fused
        assert torch.equal(value.signbit(), (torch.ones(length, 4) * factor).signbit())
    assert sorted(planned) == [((length, 4), text) for length in (5, 6) for text in ("-0.0", "0.0", "2.0")]


def test_plans_of_all_kernels_keep_no_tensor(kernels):
    made = {
        "modulate": lambda: (rows(), row(), row()),
        "gated_residual": lambda: (rows(), row(), rows(), None),
        "layer_norm_modulate": lambda: (rows(), row(), row(), None, 1e-6),
        "residual_layer_norm_modulate": lambda: (rows(), row(), rows(), rows(), row(), row(), None, 1e-6),
        "rms_norm_modulate": lambda: (rows(), row(), row(), 1e-6),
        "residual_rms_norm_modulate": lambda: (rows(), row(), rows(), row(), row(), row(), row(), 1e-6),
        "qk_norm_rope": lambda: (heads(), heads(), scale(), scale(), torch.ones(1, 16, 128), 1e-6),
        "joint_qk_norm_rope": lambda: (
            *(heads(), heads(), scale(), scale(), angles(), angles(), 1e-6),
            *(heads(), heads(), scale(), scale()),
        ),
        "qk_norm_split_rope": lambda: (
            *(rows(), rows(), scale(), scale()),
            *(torch.ones(1, 2, 16, 32) for _ in range(4)),
            1e-6,
        ),
        "swiglu": lambda: (rows(),),
        "swiglu_concat": lambda: (rows(), rows()),
        "quantize_rows": lambda: (rows(),),
        "swiglu_quantize_rows": lambda: (rows(),),
        "guided_euler_step": lambda: (rows(), rows(), rows(), 4.0, torch.tensor(0.5)),
        "group_norm_silu": lambda: (
            torch.ones(1, 4, 32, 32).bfloat16(),
            2,
            row()[0, 0, :4],
            row()[0, 0, :4],
            1e-6,
        ),
        "channel_norm_silu": lambda: (torch.ones(1, 4, 2, 8, 8).bfloat16(), 1e-8),
    }
    assert set(made) == set(SITE_NAMES)
    for name, arguments in made.items():
        args = arguments()
        assert kernels[name].refuses(*args) == "", name
        gone = [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
        plan = kernels[name].plan(*args)
        del args
        gc.collect()
        assert all(reference() is None for reference in gone), name
        assert callable(plan)


def rows():
    return torch.ones(1, 16, 128).bfloat16()


def row():
    return torch.ones(1, 1, 128).bfloat16()


def heads():
    return torch.ones(1, 16, 2, 128).bfloat16()


def scale():
    return torch.ones(128).bfloat16()


def angles():
    return torch.ones(32, 128)
