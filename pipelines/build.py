"""From a resolved configuration to a pipeline: device, size and dtype are decided here."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, Protocol

import torch

from accel.errors import ConfigError
from accel.policy import AccelPolicy
from pipelines.catalogue import MODELS
from pipelines.pipeline import Pipeline, Placement, current_device
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.weights_config import WeightsConfig


class BuildConfig(Protocol):
    """What building needs of the configuration; see `tasks.config.RunConfig`."""

    @property
    def model(self) -> Any: ...
    @property
    def accel(self) -> AccelPolicy: ...
    @property
    def weights(self) -> WeightsConfig: ...
    @property
    def size(self) -> Literal["auto", "tiny", "full"]: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> Literal["auto", "bf16", "fp32"]: ...


def build(config: BuildConfig, *, progress: Progress = NULL_PROGRESS) -> Pipeline[Any, Any]:
    """Load the model and bind it to its acceleration policy.

    Float32 products keep float32 precision (no TF32) in this process from here on.
    Raises: ConfigError for a model or device that can't be used, CheckpointError for weights,
        DeviceMemoryError before anything is allocated.
    """
    loader = MODELS[config.model.name].loader
    _keep_float32_precision()
    placement = _place(config)
    with current_device(placement.device):
        pipeline: Pipeline[Any, Any] = import_module(loader).load(
            config, placement=placement, progress=progress
        )
    return pipeline


def choose_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here. Raises: ConfigError if there is none."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device={name}: this machine has {count} CUDA devices. Use device=auto.")
        return torch.device("cuda", device.index or 0)
    return device


def _keep_float32_precision() -> None:
    """Both of torch's ways to say it, so that neither a default nor an environment variable decides."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.fp32_precision = "ieee"
    torch.backends.cudnn.allow_tf32 = False


def _place(config: BuildConfig) -> Placement:
    device = choose_device(config.device)
    size, reason = _size(config, device)
    on_cuda = device.type == "cuda"
    dtype = {
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "auto": torch.bfloat16 if on_cuda else torch.float32,
    }
    return Placement(device=device, dtype=dtype[config.dtype], size=size, size_reason=reason)


def _size(config: BuildConfig, device: torch.device) -> tuple[Literal["tiny", "full"], str]:
    if config.size != "auto":
        return config.size, "as asked"
    if config.weights.kind != "synthetic":
        return "full", "weights are given"
    if device.type == "cuda":
        return "full", "CUDA is there"
    return "tiny", "no CUDA and no weights given"
