"""Values of config.json against the parameters of diffusers' classes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

from accel.errors import CheckpointError
from pipelines.flux2.config import flux2_config
from pipelines.library_config import check_values
from pipelines.ltx2 import components as ltx2
from pipelines.ltx2.architectures import Size, architecture

FILE = Path("folder/part/config.json")


class Part:
    def __init__(
        self,
        width: int = 8,
        eps: float = 1e-6,
        name: str = "x",
        causal: bool = False,
        ratio: int = None,  # noqa: RUF013  # as diffusers writes it
        bins: int | None = 64,
        factors: tuple[int, int, int] = (8, 32, 32),
        widths: tuple[int, ...] = (1, 2),
        scaling: bool | tuple[bool, ...] = True,
        dilations: list[list[int]] = [[1, 3]],  # noqa: B006
        kind: Literal["exponential", "linear"] = "linear",
        betas: np.ndarray[Any, Any] | list[float] | None = None,
        plain=True,
    ) -> None: ...


@pytest.mark.parametrize(
    "config",
    [
        {"width": 4, "eps": 1, "causal": True, "ratio": None, "bins": None, "kind": "exponential"},
        {"width": 4.0, "causal": 1, "factors": [4, 16, 16], "widths": [], "scaling": [True, False]},
        {"ratio": 32, "dilations": [[1], []], "betas": [0.1], "plain": False},
        {"betas": "undecided", "no_parameter": None, "_class_name": "Part"},
    ],
)
def test_what_the_parameters_take_passes(config: dict[str, Any]) -> None:
    check_values(config, Part, FILE)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("width", None, "int"),
        ("width", "4", "int"),
        ("width", 4.5, "int"),
        ("width", [4], "int"),
        ("eps", None, "float"),
        ("name", 3, "str"),
        ("causal", "false", "bool"),
        ("causal", 2, "bool"),
        ("ratio", "x", "int"),
        ("bins", "x", "int | None"),
        ("factors", [8, 32], "tuple[int, int, int]"),
        ("factors", 8, "tuple[int, int, int]"),
        ("widths", [1, None], "tuple[int, ...]"),
        ("scaling", "x", "bool | tuple[bool, ...]"),
        ("dilations", [1, 3], "list[list[int]]"),
        ("kind", "cubic", "Literal['exponential', 'linear']"),
        ("plain", None, "bool"),
    ],
)
def test_what_they_do_not_take_is_named(key: str, value: object, expected: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        check_values({key: value}, Part, FILE)
    assert f"{FILE}: '{key}' is {json.dumps(value)}, but Part takes {expected}. " in str(refused.value)


def test_every_fault_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'width' is null.*; 'eps' is null"):
        check_values({"width": None, "eps": None}, Part, FILE)


def known_values() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Classes of both families with the values of every variant and size."""
    scheduler = ltx2._SCHEDULER
    for size in get_args(Size):
        for variant in ("2.0", "2.0-distilled", "2.3"):
            plan = architecture(variant, size)
            vocoder = ltx2._VOCODERS[plan.vocoder_class]
            classes = {**ltx2._CLASSES, "vocoder": vocoder, "scheduler": scheduler}
            classes["latent_upsampler"] = ltx2.LTX2LatentUpsamplerModel
            yield from ((made, dict(getattr(plan, name))) for name, made in classes.items())
        for variant in ("4b", "4b-base", "9b", "9b-base", "dev"):
            config = flux2_config(variant, size)
            yield Flux2Transformer2DModel, dict(config.transformer)
            yield AutoencoderKLFlux2, dict(config.vae)
            yield scheduler, dict(config.scheduler)


def test_all_that_is_known_of_both_families_passes() -> None:
    for library_class, values in known_values():
        parameters = inspect.signature(library_class.__init__).parameters.items()
        defaults = {name: parameter.default for name, parameter in parameters if name != "self"}
        in_a_file = json.loads(json.dumps({**defaults, **values}))
        check_values(in_a_file, library_class, FILE)
