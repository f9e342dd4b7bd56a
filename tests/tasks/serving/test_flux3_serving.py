"""FLUX 3 Action behind the server: the bits of the bare pipeline over every protocol."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from serving_harness import WAIT_S, Running, serving
from websockets.sync.client import connect

from accel.errors import ConfigError, ObservationError, StrictModeError, UnequalBitsError
from accel.policy import AccelPolicy
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.policy_config_parsing import parse_policy_config
from pipelines.flux3_action.settings import Flux3Settings
from pipelines.flux3_action.weights import load_components
from pipelines.pipeline import Placement
from pipelines.weights_config import WeightsConfig
from tasks import client, serve
from tasks.config import ROOT, RunConfig, compose
from tasks.serving.bodies import MSGPACK
from tasks.serving.codec import Limits, decode, encode
from tasks.serving.flux3 import Flux3Defaults, Flux3Policy, metadata
from tasks.serving.policy import Parameters
from tasks.serving.settings import ClientTask, ServeTask

# The stock client uses a form of `connect` that its library no longer recommends.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")

EPISODE = ROOT / "data" / "panda_lift"
SETTINGS = Flux3Settings(steps=1, guidance=1.0, guidance_action=1.0)  # quick, and no less exact
DEFAULTS = Flux3Defaults(
    model_path="synthetic", settings=SETTINGS, seed=None, images=ImageFormat(), max_steps=4
)


@pytest.fixture(scope="module")
def pipeline(eager_policy: AccelPolicy) -> Flux3ActionPipeline:
    placement = Placement(device=torch.device("cpu"), dtype=torch.float32, size="tiny", size_reason="test")
    components = load_components(
        weights=WeightsConfig(kind="synthetic"),
        variant="base",
        size="tiny",
        device=placement.device,
        dtype=placement.dtype,
    )
    return Flux3ActionPipeline(
        components, policy=eager_policy, placement=placement, outputs_mean_nothing=True
    )


def policy_of(pipeline: Flux3ActionPipeline, **options: Any) -> Flux3Policy:
    seen = parse_observation(load_episode_frame(EPISODE, 0), pipeline.config)
    return Flux3Policy(pipeline, **{"defaults": DEFAULTS, "warm_up_with": [seen], "strict": False} | options)


@pytest.fixture(scope="module")
def server(pipeline: Flux3ActionPipeline) -> Iterator[Running]:
    with serving(policy_of(pipeline)) as running:
        yield running


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    """A frame of the episode as a robot holds it."""
    raw = load_episode_frame(EPISODE, 5)
    return {
        "images": {camera: np.asarray(image) for camera, image in raw["images"].items()},
        "state": np.asarray(raw["state"], np.float32),
        "prompt": raw["prompt"],
    }


@pytest.fixture(scope="module")
def expected(pipeline: Flux3ActionPipeline, arrays: dict[str, Any]) -> torch.Tensor:
    """What the pipeline gives when it is called by itself, with seed 7."""
    request = pipeline.request(parse_observation(arrays, pipeline.config), seed=7, settings=SETTINGS)
    return torch.from_numpy(pipeline.run(request).actions)


SEED = {"parameters": {"seed": 7}}


def over_openpi(server: Running, arrays: dict[str, Any]) -> Any:
    images = {f"observation.images.{camera}": image for camera, image in arrays["images"].items()}
    observation = {**images, "observation.state": arrays["state"], "prompt": arrays["prompt"], **SEED}
    return WebsocketClientPolicy(server.ws).infer(observation)["actions"]


def over_robolab(server: Running, arrays: dict[str, Any]) -> Any:
    names = {"wrist": "wrist_image_left", "left": "exterior_image_1_left", "right": "exterior_image_2_left"}
    images = {f"observation/{name}": arrays["images"][camera] for camera, name in names.items()}
    state = {
        "observation/joint_position": arrays["state"][:7],
        "observation/gripper_position": arrays["state"][7:],
    }
    return WebsocketClientPolicy(server.ws).infer({**images, **state, "prompt": arrays["prompt"], **SEED})[
        "action"
    ]


def over_realtime(server: Running, arrays: dict[str, Any]) -> Any:
    with connect(server.ws + "/v1/actions/realtime") as connection:
        connection.send(encode({"input": arrays, **SEED}))
        return decode(connection.recv(WAIT_S), Limits())["data"][0]["action"]["values"]


def over_http_json(server: Running, arrays: dict[str, Any]) -> Any:
    images = {
        camera: {
            "data": base64.b64encode(image.tobytes()).decode(),
            "dtype": "uint8",
            "shape": list(image.shape),
        }
        for camera, image in arrays["images"].items()
    }
    body = {"input": {"observation": {**arrays, "images": images, "state": arrays["state"].tolist()}}, **SEED}
    values = _post(server, json=body).json()["data"][0]["action"]["values"]
    return np.array(values, np.float32)


def over_http_pixel_lists(server: Running, arrays: dict[str, Any]) -> Any:
    images = {camera: image.tolist() for camera, image in arrays["images"].items()}
    body = {"input": {**arrays, "images": images, "state": arrays["state"].tolist()}, **SEED}
    return np.array(_post(server, json=body).json()["data"][0]["action"]["values"], np.float32)


def over_http_msgpack(server: Running, arrays: dict[str, Any]) -> Any:
    answer = _post(server, content=encode({"input": arrays, **SEED}), headers={"content-type": MSGPACK})
    return decode(answer.content, Limits())["data"][0]["action"]["values"]


def over_http_form(server: Running, arrays: dict[str, Any]) -> Any:
    request = json.dumps({"input": {"state": arrays["state"].tolist(), "prompt": arrays["prompt"]}, **SEED})
    files = {camera: (EPISODE / f"{camera}_005.jpg").read_bytes() for camera in arrays["images"]}
    answer = _post(server, files={**files, "request": ("", request)})
    return np.array(answer.json()["data"][0]["action"]["values"], np.float32)


def _post(server: Running, **options: Any) -> httpx.Response:
    answer = httpx.post(server.http + "/v1/actions/generations", timeout=WAIT_S, **options)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(
    "send",
    [
        over_openpi,
        over_robolab,
        over_realtime,
        over_http_json,
        over_http_pixel_lists,
        over_http_msgpack,
        over_http_form,
    ],
)
def test_equal_bits_over_every_protocol(send: Any, server, arrays, expected: torch.Tensor) -> None:
    actions = send(server, arrays)
    assert actions.dtype == np.float32
    assert torch.equal(torch.from_numpy(actions.copy()), expected)


def test_one_bit_of_one_pixel_reaches_the_policy(server, arrays, expected: torch.Tensor) -> None:
    wrist = arrays["images"]["wrist"].copy()
    wrist[100, 100, 0] ^= 128
    changed = {**arrays, "images": {**arrays["images"], "wrist": wrist}}
    assert not torch.equal(torch.from_numpy(over_openpi(server, changed).copy()), expected)


def test_recorded_metadata_of_the_released_policy(golden_json) -> None:
    golden = golden_json("protocol.json")
    config = parse_policy_config(golden["droid_policy_config"])
    name = "black-forest-labs/flux-3-action-droid"
    ours = metadata(config, replace(DEFAULTS, model_path=name, settings=Flux3Settings()))
    control = ours.pop("control")
    assert ours == golden["droid_metadata"]
    assert (control["fps"], control["n_action_steps"]) == (15.0, 32)
    assert control["channels"][7] == {"name": "gripper", "unit": "closed fraction"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"state": np.full(8, np.nan, np.float32)}, "state: NaN"),
        ({"state": np.full(8, np.inf)}, "state: NaN, infinite"),
        ({"state": np.zeros(7)}, "send 8 numbers"),
        ({"images": {}}, "this policy needs wrist, left, right"),
        ({"images": {"wrist": np.zeros((10, 10, 3), np.uint8)}}, "no camera left, right"),
        ({"images": [1, 2, 3]}, "a mapping from camera to image"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "x" * 65537}, "prompt: 65537 characters; at most 65536 are taken"),
        ({"parameters": {"num_inference_steps": 5}}, "at most 4"),
        ({"parameters": {"action_horizon": 33}}, "returns 1..32"),
        ({"parameters": {"guidance_scale": float("inf")}}, "guidance"),
    ],
)
def test_what_the_policy_refuses_is_told_and_nothing_breaks(
    changes: dict[str, Any], told: str, server, arrays
) -> None:
    policy = WebsocketClientPolicy(server.ws)
    with pytest.raises(RuntimeError, match="invalid: ") as caught:
        policy.infer({**arrays, **changes})
    assert told in str(caught.value)
    assert policy.infer({**arrays, "parameters": {"action_horizon": 3}})["actions"].shape == (3, 8)


def test_parameters_reach_the_sampler(pipeline: Flux3ActionPipeline, arrays) -> None:
    policy = policy_of(pipeline)
    asked = Parameters(num_inference_steps=3, action_horizon=5, seed=11, guidance_scale=2.0)
    request = policy.prepare(arrays, asked)
    assert (request.steps, request.horizon, request.seed) == (3, 5, 11)
    assert (request.guidance_video, request.guidance_action) == (2.0, 1.0)
    default = policy.prepare(arrays, Parameters())
    assert (default.steps, default.horizon, default.seed) == (1, 32, 0)


def test_declared_image_format(pipeline: Flux3ActionPipeline, arrays, expected: torch.Tensor) -> None:
    """Case C23: cameras that send BGR."""
    bgr = {camera: image[..., ::-1] for camera, image in arrays["images"].items()}
    policy = policy_of(pipeline, defaults=replace(DEFAULTS, images=ImageFormat(order="bgr"), seed=7))
    request = policy.prepare({**arrays, "images": bgr}, Parameters())
    assert torch.equal(torch.from_numpy(policy.infer(request).actions), expected)
    chw = {camera: image.transpose(2, 0, 1) for camera, image in arrays["images"].items()}
    with pytest.raises(ObservationError, match="declare the layout"):
        policy.prepare({**arrays, "images": chw}, Parameters())


def test_a_warm_up_of_unequal_bits_is_refused(pipeline: Flux3ActionPipeline, monkeypatch) -> None:
    results = iter(range(10))
    run = pipeline.run

    def drifting(request: Any, **options: Any) -> Any:
        result = run(request, **options)
        return replace(result, actions=result.actions + np.float32(next(results)))

    monkeypatch.setattr(pipeline, "run", drifting)
    with pytest.raises(UnequalBitsError):
        policy_of(pipeline).warm_up()


def test_strict_refuses_to_serve_what_is_not_accelerated(pipeline: Flux3ActionPipeline, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "strict_violations", lambda: ["denoising: no_cuda"])
    with pytest.raises(StrictModeError, match="denoising: no_cuda"):
        policy_of(pipeline, strict=True).warm_up()


def run_config(task: Any, **changes: Any) -> RunConfig:
    base = compose("accel=eager", "size=tiny", "device=cpu", "logger=plain", "weights=synthetic", "seed=7")
    return replace(base, task=task, model=SETTINGS, **changes)


def test_client_task_replays_and_writes_what_an_arm_would_do(
    server, pipeline: Flux3ActionPipeline, tmp_path: Path, capsys
) -> None:
    task = ClientTask(name="client", url=server.ws, requests=3, rate_hz=0.0, open_loop=2)
    client.main(run_config(task), folder=tmp_path)
    actions = np.load(tmp_path / "actions.npy")
    rows = []
    for frame in (0, 2, 4):
        seen = parse_observation(load_episode_frame(EPISODE, frame), pipeline.config)
        rows.append(pipeline.run(pipeline.request(seen, seed=7, settings=SETTINGS)).actions[:2])
    assert np.array_equal(actions, np.concatenate(rows))
    report = json.loads((tmp_path / client.LATENCY_FILE).read_text())
    assert (report["requests"], report["refused"], len(report["latencies_ms"])) == (3, [], 3)
    assert report["latency_ms"]["p100"] == max(report["latencies_ms"])
    assert {file.name for file in tmp_path.iterdir()} == {
        "actions.npy",
        "actions.json",
        "actions.png",
        "latency.json",
    }
    text = capsys.readouterr().out
    for word in ("latency", "jitter", str(tmp_path)):
        assert word in text


def test_client_task_counts_missed_deadlines(server, tmp_path: Path) -> None:
    task = ClientTask(name="client", url=server.ws, requests=2, rate_hz=1000.0, deadline_ms=0.001)
    client.main(run_config(task), folder=tmp_path)
    report = json.loads((tmp_path / client.LATENCY_FILE).read_text())
    assert report["missed_deadlines"] == 2
    assert report["late_ms"][1] > 0


def test_client_task_without_a_server(tmp_path: Path) -> None:
    task = ClientTask(name="client", url="ws://127.0.0.1:9", requests=1)
    with pytest.raises(ConfigError, match=r"task\.url=ws://127\.0\.0\.1:9: no policy server"):
        client.main(run_config(task), folder=tmp_path)


def test_serve_task_checks_before_it_loads(tmp_path: Path, monkeypatch) -> None:
    def load(config: RunConfig, **options: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(serve, "build", load)
    for task in (
        ServeTask(name="serve", token_file=str(tmp_path / "none")),
        ServeTask(name="serve", tls_certificate=str(tmp_path / "c"), tls_key=str(tmp_path / "k")),
        ServeTask(name="serve", host="203.0.113.1", port=0),
    ):
        with pytest.raises(ConfigError):
            serve.main(run_config(task), folder=tmp_path)
