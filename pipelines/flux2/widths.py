"""Whose widths a transformer has: folders of different variants are alike but for these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from accel.errors import CheckpointError
from pipelines.flux2.config import Flux2Config, flux2_config
from pipelines.flux2.settings import Variant

_TELLING = ("num_attention_heads", "num_layers", "num_single_layers", "joint_attention_dim")


def own_widths(transformer: Mapping[str, Any], config: Flux2Config) -> str:
    """In what a transformer departs from the variant, in words; empty if in nothing.

    transformer: the config of the diffusers class.
    """
    return "; ".join(
        f"{name} is {transformer[name]}, not {config.transformer[name]}"
        for name in _TELLING
        if transformer[name] != config.transformer[name]
    )


def require_no_other_variant(transformer: Mapping[str, Any], config: Flux2Config, variant: str) -> None:
    """Arguments as `own_widths`; variant: the name of `config`.

    Raises: CheckpointError if the widths are those of another variant, naming it.
    """
    own = own_widths(transformer, config)
    if not own:
        return
    for name in get_args(Variant):
        other = flux2_config(name, "full")
        is_alike = (other.pipeline, other.distilled) == (config.pipeline, config.distilled)
        if is_alike and not own_widths(transformer, other):
            raise CheckpointError(
                f"{own}, as in model.variant={variant}. These are the widths of {name}: "
                f"use model.variant={name}."
            )
