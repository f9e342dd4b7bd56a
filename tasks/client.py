"""`task=client`: replay a recorded episode against a policy server and report how well it keeps time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from accel.errors import ConfigError, ObservationError
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.flux3_action.outputs import Channel, Origin, action_files
from pipelines.flux3_action.request import ActionResult
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.output_folder import OutputFolder
from tasks.config import RunConfig, config_hash
from tasks.serving.replay import Control, Replay, ServerError, connected, replay
from tasks.serving.settings import ClientTask, read_token

LATENCY_FILE = "latency.json"
PERCENTILES = (50, 90, 95, 99, 100)

Floats = npt.NDArray[np.float32]


def main(config: RunConfig, *, folder: Path) -> None:
    """Replay, print, and write actions.npy, actions.json, actions.png and latency.json.

    The actions are those that a robot would have executed: the first `open_loop` of each chunk.
    Raises: ConfigError, ObservationError, OutputError before anything is sent; ServerError.
    """
    task = config.task
    assert isinstance(task, ClientTask)
    with OutputFolder.claim(folder, result_name=LATENCY_FILE) as output:
        token = read_token(task.token_file)
        observations = _observations(config, task)
        with connected(task.url, token) as (connection, control):
            rate = control.fps if task.rate_hz is None else task.rate_hz
            period_s = task.open_loop / rate if rate else 0.0
            played = replay(connection, observations, period_s=period_s)
        report = _report(played, deadline_ms=task.deadline_ms or period_s * 1e3 or None)
        if config.logger.kind != "quiet":
            print("\n".join(_lines(report)))
        files = _files(config, task, played, control, observations[0])
        output.write({**files, LATENCY_FILE: (json.dumps(report, indent=1) + "\n").encode()})
        print(output.path)


def _observations(config: RunConfig, task: ClientTask) -> list[dict[str, Any]]:
    """One message for each request, in OpenPI's keys; the episode is repeated if it is shorter."""
    if not isinstance(config.model, Flux3Settings):
        raise ConfigError(
            "task=client sends a robot's observations to a policy, model=flux3_action; "
            f"model={config.model.name} takes none."
        )
    source = config.observation
    if source is None or source.episode is None:
        raise ConfigError("task=client replays an episode; set observation.episode, e.g. data/panda_lift")
    parameters = _parameters(config)
    load_episode_frame(source.episode, source.frame)  # refuses what is no episode
    length = len(msgspec.json.decode((Path(source.episode) / "episode.json").read_bytes())["frames"])
    wanted = itertools.islice(range(source.frame, length, task.open_loop), task.requests)
    frames = [_message(source.episode, frame, config.prompt, parameters) for frame in wanted]
    return list(itertools.islice(itertools.cycle(frames), task.requests))


def _message(episode: str, frame: int, prompt: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    raw = load_episode_frame(episode, frame)
    images = {f"observation.images.{name}": _pixels(name, image) for name, image in raw["images"].items()}
    state = np.asarray(raw["state"], dtype=np.float32)
    return {
        **images,
        "observation.state": state,
        "prompt": raw["prompt"] if prompt is None else prompt,
        "parameters": dict(parameters),
    }


def _pixels(camera: str, image: Image.Image) -> npt.NDArray[np.uint8]:
    if image.mode != "RGB":
        raise ObservationError(f"camera '{camera}': mode {image.mode}; a robot's frames are RGB")
    return np.asarray(image)


def _parameters(config: RunConfig) -> dict[str, Any]:
    """What the configuration asks of the server's sampler."""
    model = config.model
    assert isinstance(model, Flux3Settings)
    if model.sampler is not None or model.shift is not None:
        raise ConfigError("model.sampler, model.shift: task=client can't set them; the server does.")
    asked = {
        "num_inference_steps": model.steps,
        "action_horizon": model.horizon,
        "seed": config.seed,
        "guidance_scale": model.guidance,
        "guidance_scale_action": model.guidance_action,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _report(played: Replay, *, deadline_ms: float | None) -> dict[str, Any]:
    """JSON-ready: milliseconds, and counts."""
    latencies = played.latencies_ms
    return {
        "requests": len(latencies),
        "refused": [chunk for chunk in played.chunks if isinstance(chunk, str)],
        "latency_ms": {f"p{p}": float(np.percentile(latencies, p)) for p in PERCENTILES},
        "jitter_ms": played.jitter_ms,
        "deadline_ms": deadline_ms,
        "missed_deadlines": None if deadline_ms is None else played.missed(deadline_ms),
        "latencies_ms": latencies,
        "late_ms": played.late_ms,
        "server_timing": [dict(timing) for timing in played.timings],
    }


def _lines(report: Mapping[str, Any]) -> list[str]:
    latency = "  ".join(f"{name} {value:.1f}" for name, value in report["latency_ms"].items())
    lines = [
        f"requests  {report['requests']}, refused {len(report['refused'])}",
        f"latency   {latency} ms",
        f"jitter    {report['jitter_ms']:.2f} ms between neighbours",
    ]
    if report["deadline_ms"] is not None:
        lines.append(f"deadline  {report['deadline_ms']:.1f} ms, missed {report['missed_deadlines']}")
    return lines + [f"refused   {message}" for message in sorted(set(report["refused"]))]


def _files(
    config: RunConfig,
    task: ClientTask,
    played: Replay,
    control: Control,
    first: Mapping[str, Any],
) -> dict[str, bytes]:
    chunks = [chunk[: task.open_loop] for chunk in played.chunks if not isinstance(chunk, str)]
    if not chunks:
        raise ServerError(f"No frame got actions. The server says: {played.chunks[0]}")
    executed = ActionResult(
        actions=np.concatenate(chunks),
        state=first["observation.state"],
        canvas=np.zeros((3, 1, 1), np.float32),
        fps=control.fps,
        prompt=first["prompt"],
        seed=config.seed or 0,
        outputs={},
    )
    channels = tuple(Channel(channel.name, channel.unit) for channel in control.channels)
    origin = Origin(config_hash=config_hash(config), outputs_mean_nothing=False)
    files = action_files(executed, channels=channels, origin=origin)
    del files["canvas.png"]  # the canvas stays with the server
    return files
