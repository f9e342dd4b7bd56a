"""What building settles for the process and refuses."""

from __future__ import annotations

import pytest
import torch

from accel.errors import ConfigError
from pipelines.build import build, choose_device
from tasks.config import compose

CUDNN = torch.backends.cudnn


def test_float32_products_keep_their_precision_whatever_was_set_before() -> None:
    matmul, cudnn, allowed = torch.get_float32_matmul_precision(), CUDNN.fp32_precision, CUDNN.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        CUDNN.allow_tf32 = True
        build(compose("size=tiny", "device=cpu", "accel=eager")).close()
        assert torch.get_float32_matmul_precision() == "highest"
        assert (CUDNN.fp32_precision, CUDNN.allow_tf32) == ("ieee", False)
    finally:
        torch.set_float32_matmul_precision(matmul)
        CUDNN.fp32_precision, CUDNN.allow_tf32 = cudnn, allowed


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has"):
        choose_device("cuda:99")
    assert choose_device("cpu") == torch.device("cpu")
