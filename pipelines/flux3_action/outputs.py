"""The files that one chunk of actions becomes: actions.npy, actions.json, actions.png, canvas.png."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accel.errors import OutputError
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.request import ActionResult
from pipelines.pixel_files import eight_bit, png

Floats = npt.NDArray[np.float32]

_log = logging.getLogger("samebit")

SCHEMA = 1
MEANINGLESS = "Synthetic weights: these actions mean nothing."


@dataclass(frozen=True)
class Channel:
    """One column of the actions. unit: as written beside numbers, e.g. "rad"."""

    name: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a result came from; written into every file that has room for it.

    config_hash: of the resolved configuration. outputs_mean_nothing: synthetic weights.
    """

    config_hash: str
    outputs_mean_nothing: bool

    def note_on(self, result: ActionResult) -> str:
        """What a reader of the result must know; empty if nothing."""
        own = (MEANINGLESS,) if self.outputs_mean_nothing else ()
        return " ".join((*own, *result.notes))


GRIPPER = Channel("gripper", "closed fraction")
_DROID = (*(Channel(f"joint {n}", "rad") for n in range(1, 8)), GRIPPER)


def channels_of(config: PolicyConfig) -> tuple[Channel, ...]:
    """Names and units of the A action channels.

    Known for DROID (seven joints in radians, gripper 0 open .. 1 closed; spec section 5). Other
    packages don't say, so their columns are numbered and carry "dataset units".
    """
    if config.action_modality == "action_prediction_droid" and config.action_dim == len(_DROID):
        return _DROID
    return tuple(Channel(f"channel {n}", "dataset units") for n in range(1, config.action_dim + 1))


def action_files(result: ActionResult, *, channels: tuple[Channel, ...], origin: Origin) -> dict[str, bytes]:
    """File name -> contents, all of them encoded before any is written.

    actions.npy holds the float32 (K, A) array bit for bit; actions.json the same numbers with
    names, units and times.
    Raises: OutputError naming the first value that is not finite.
    """
    for name in ("actions", "state", "canvas"):
        _require_finite(name, getattr(result, name))
    return {
        "actions.npy": _npy(result.actions),
        "actions.json": _actions_json(result, channels, origin),
        "canvas.png": _canvas_png(result, origin),
        **_plot(result, channels, origin),
    }


def action_times(result: ActionResult) -> npt.NDArray[np.float64]:
    """Seconds after the observation at which each action applies: (k + 1) / fps (spec section 9)."""
    return np.arange(1, len(result.actions) + 1) / result.fps


def _plot(result: ActionResult, channels: tuple[Channel, ...], origin: Origin) -> dict[str, bytes]:
    """actions.png, or a warning: whatever ails the plotting library must not cost the actions."""
    try:
        with _own_backend():
            # Takes half a second to import, and a server never draws.
            from pipelines.flux3_action.action_plot import draw_actions
        return {"actions.png": draw_actions(result, channels=channels, origin=origin)}
    except Exception as error:
        _log.warning("actions.png could not be drawn: %s: %s", type(error).__name__, error)
        return {}


@contextmanager
def _own_backend() -> Iterator[None]:
    """Hide MPLBACKEND: notebooks name a backend there that need not exist here, and the import fails."""
    chosen = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if chosen is not None:
            os.environ["MPLBACKEND"] = chosen


def _require_finite(name: str, values: Floats) -> None:
    finite = np.isfinite(values)
    if finite.all():
        return
    first = tuple(int(i) for i in np.argwhere(~finite)[0])
    raise OutputError(
        f"{name}{list(first)} is {values[first]}; {np.count_nonzero(~finite)} of {values.size} values are "
        "not finite. No output file was written. Check the weights and the guidance; if this ran in bf16, "
        "try dtype=fp32."
    )


def _npy(values: Floats) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(values), allow_pickle=False)
    return buffer.getvalue()


def _actions_json(result: ActionResult, channels: tuple[Channel, ...], origin: Origin) -> bytes:
    """One key a line and one action a line, so that people can read it too."""
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "prompt": result.prompt,
        "seed": result.seed,
        "config_hash": origin.config_hash,
        "note": origin.note_on(result),
        "fps": result.fps,
        "channels": [{"name": c.name, "unit": c.unit} for c in channels],
        "state": _numbers(result.state),
        "time_s": [round(t, 6) for t in action_times(result).tolist()],
    }
    lines = [f' "{key}": {json.dumps(value, ensure_ascii=False)},' for key, value in head.items()]
    rows = ",\n".join(f"  {json.dumps(_numbers(row))}" for row in result.actions)
    return "\n".join(["{", *lines, f' "actions": [\n{rows}\n ]', "}", ""]).encode()


def _numbers(values: Floats) -> list[float]:
    """The shortest decimals that read back as the same float32."""
    return [float(str(value)) for value in values]


def _canvas_png(result: ActionResult, origin: Origin) -> bytes:
    """The policy's view, [-1, 1] -> 8 bit, rounded to nearest; 8-bit camera pixels come back exactly."""
    metadata = {
        "Software": "samebit",
        "prompt": result.prompt,
        "seed": str(result.seed),
        "config_hash": origin.config_hash,
    }
    return png(eight_bit(torch.from_numpy((result.canvas + 1) / 2)), metadata=metadata)
