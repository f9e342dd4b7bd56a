"""The policy server under nonsense, bad clients and load: does it hold, and what does it cost?

    python docs/benchmarks/serving.py OUT_FOLDER [--frames 100000] [--requests 10000] [OVERRIDES...]

Two servers in processes of their own, on loopback: one whose policy does nothing but check the observation,
for the protocols, and FLUX 3 Action as the overrides compose it (default: accel=graph+fused), for the cost
beside real inference. Writes serving.json and serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelines.build import build, choose_device
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.flux3_action.observation import Observation, parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.flux3_action.synthetic import droid_config
from tasks.config import compose
from tasks.environment import device_facts, software
from tasks.serving.app import make_app
from tasks.serving.codec import Limits, decode, encode
from tasks.serving.flux3 import Flux3Defaults, Flux3Policy
from tasks.serving.policy import Answer, Parameters, Policy, RegionCalls
from tasks.serving.server import Server, bind
from tasks.serving.service import Service
from tasks.serving.settings import ServeTask

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 8
HALF_OPEN = 20
SLOW_READERS = 4
WAIT_S = 600.0


class CheckOnly:
    """Checks three-camera observations as FLUX 3 Action does, and returns fixed actions."""

    metadata: Mapping[str, Any] = {"model": "check-only"}

    def __init__(self) -> None:
        self._config = droid_config("full")

    def warm_up(self) -> None:
        pass

    def prepare(self, observation: Mapping[str, Any], parameters: Parameters) -> Observation:
        return parse_observation(observation, self._config)

    def infer(self, request: Observation) -> Answer:
        return Answer(actions=np.zeros((32, 8), np.float32), steps=0)

    def region_calls(self) -> Iterable[RegionCalls]:
        return ()


@dataclass(frozen=True)
class Child:
    """A server in a process of its own."""

    port: int
    pid: int

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @contextlib.contextmanager
    def opened(self) -> Iterator[ClientConnection]:
        with connect(self.ws, compression=None, max_size=None) as connection:
            connection.recv(WAIT_S)
            yield connection


def serve(overrides: list[str]) -> None:
    """In the child: print the port, and serve until SIGTERM."""
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    policy = flux3(overrides) if overrides else CheckOnly()
    asyncio.run(_serve(policy, listener))


async def _serve(policy: Policy, listener: socket.socket) -> None:
    service = Service(policy, queue_size=64)
    await Server(
        make_app(service, limits=Limits(), token=None), service, ServeTask(name="serve", max_connections=256)
    ).run_service(listener)


def flux3(overrides: list[str]) -> Flux3Policy:
    config = compose(*overrides)
    pipeline = build(config)
    defaults = Flux3Defaults(
        model_path="benchmark", settings=config.model, seed=0, images=ImageFormat(), max_steps=32
    )
    seen = parse_observation(load_episode_frame(ROOT / "data" / "panda_lift", 0), pipeline.config)
    return Flux3Policy(pipeline, defaults=defaults, warm_up_with=[seen], strict=False)


@contextlib.contextmanager
def child(overrides: list[str]) -> Iterator[Child]:
    command = [sys.executable, __file__, "--serve", *overrides]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        server = Child(int(process.stdout.readline()), process.pid)
        try:
            _wait_until_ready(server, process)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            errors.seek(0)
            print(errors.read()[-4000:], end="", file=sys.stderr)
    if process.returncode != 0:
        raise RuntimeError(f"The server ended with {process.returncode}.")


def _wait_until_ready(server: Child, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(server.http + "/readyz").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("The server did not become ready.")


def observation() -> dict[str, Any]:
    raw = load_episode_frame(ROOT / "data" / "panda_lift", 3)
    images = {f"observation.images.{name}": np.asarray(image) for name, image in raw["images"].items()}
    return {**images, "observation.state": np.asarray(raw["state"], np.float32), "prompt": raw["prompt"]}


def nonsense(chance: random.Random) -> bytes:
    """Random bytes, or a small observation with bytes changed, cut or repeated."""
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(100))
    image = np.zeros((2, 3, 3), np.uint8)
    data = bytearray(encode({"state": np.zeros(8, np.float32), "images": {"wrist": image}, "prompt": "go"}))
    for _ in range(chance.randrange(1, 6)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    start, end = sorted(chance.choices(range(len(data) + 1), k=2))
    return bytes(data if chance.random() < 0.5 else data[:end] + data[start:])


def malformed(server: Child, count: int) -> dict[str, Any]:
    """Nonsense that must be refused in words; memory after a tenth of it as warm-up."""
    ask(server, 20)
    _refused(server, count // 10)
    ask(server, 20)
    before = server.resident_mib()
    refused = _refused(server, count)
    ask(server, 20)  # the server goes on
    return {"refused": refused, "growth_mib": server.resident_mib() - before}


def _refused(server: Child, count: int) -> int:
    """Half as frames, half as bodies. Returns: how many were refused, which is all, or this raises."""
    chance, refused = random.Random(1), 0
    with server.opened() as connection:
        for _ in range(count // 2):
            connection.send(nonsense(chance))
            message = connection.recv(WAIT_S)
            if not (isinstance(message, str) and message.startswith("invalid: ")):
                raise RuntimeError(f"A malformed frame was answered with {message!r:.200}")
            refused += 1
    kinds = ("application/json", "application/msgpack", "multipart/form-data; boundary=b")
    with httpx.Client(base_url=server.http, timeout=WAIT_S) as client:
        for number in range(count // 2):
            answer = client.post(
                "/v1/actions/generations",
                content=nonsense(chance),
                headers={"content-type": kinds[number % len(kinds)]},
            )
            if answer.status_code != 400:
                raise RuntimeError(f"A malformed body was answered with {answer.text:.200}")
            refused += 1
    return refused


def disconnects(server: Child, count: int) -> dict[str, Any]:
    """Clients that leave in the middle of a frame, a handshake or an inference, half of them with a reset."""
    frame = encode(observation())
    handshake = (
        b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    data = handshake + b"\x82\xff" + struct.pack(">Q", len(frame)) + bytes(4) + frame
    ask(server, 20)
    chance, before = random.Random(2), server.resident_mib()

    def visit(number: int) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as visitor:
            if number % 2:
                visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            visitor.sendall(data[: chance.choice([50, len(handshake) + 9, len(data) // 2, len(data)])])

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(visit, range(count)))
    gone = time.perf_counter()
    while True:  # while more than max_connections are still being closed, new ones are turned away
        with contextlib.suppress(WebSocketException, OSError):
            after = ask(server, 20)
            break
    return {
        "count": count,
        "back_after_s": time.perf_counter() - gone,
        "p50_ms_after": after["p50"],
        "growth_mib": server.resident_mib() - before,
    }


def bad_neighbours(server: Child) -> dict[str, Any]:
    """Latency of a good client beside sockets that say nothing and clients that read nothing."""
    message = encode(observation())
    alone = ask(server, 50)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(HALF_OPEN)
        ]
        begin = time.perf_counter()
        for _ in range(SLOW_READERS):
            reader = stack.enter_context(server.opened())
            for _ in range(3):
                reader.send(message)
        beside = ask(server, 50)
        for connection in silent:
            connection.settimeout(60)
            assert connection.recv(1) == b""
        closed = time.perf_counter() - begin
    return {"alone": alone, "beside": beside, "silent_closed_after_s": closed}


def fairness(server: Child, seconds: float) -> dict[str, Any]:
    """Clients that all ask as fast as they can."""

    def converse(_: int) -> list[float]:
        return ask(server, seconds=seconds)["latencies"]

    with ThreadPoolExecutor(CLIENTS) as threads:
        latencies = list(threads.map(converse, range(CLIENTS)))
    counts = [len(row) for row in latencies]
    return {
        "clients": CLIENTS,
        "answers_by_client": counts,
        "least_over_most": min(counts) / max(counts),
        "answers_per_s": sum(counts) / seconds,
        **_summary([value for row in latencies for value in row]),
    }


def growth(server: Child, count: int) -> dict[str, Any]:
    """Resident memory over many requests of one connection, after a tenth of them as warm-up."""
    ask(server, max(count // 10, 1))
    before = server.resident_mib()
    result = ask(server, count)
    return {"requests": count, "growth_mib": server.resident_mib() - before, **_without_list(result)}


def ask(server: Child, count: int = 0, *, seconds: float = 0.0) -> dict[str, Any]:
    """Send a three-camera observation `count` times, or for so long; latency and overhead in ms.

    Overhead is what the client waits beyond the policy's own time.
    """
    message = observation()
    latencies: list[float] = []
    overheads: list[float] = []
    end = time.perf_counter() + seconds
    with server.opened() as connection:
        while len(latencies) < count or time.perf_counter() < end:
            begin = time.perf_counter()
            connection.send(encode(message))
            answer = connection.recv(WAIT_S)
            assert isinstance(answer, bytes), answer
            infer_ms = decode(answer, Limits())["server_timing"]["infer_ms"]
            latencies.append((time.perf_counter() - begin) * 1e3)
            overheads.append(latencies[-1] - infer_ms)
    return {**_summary(latencies), "overhead": _summary(overheads), "latencies": latencies}


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "p50": statistics.median(values),
        "p99": float(np.percentile(values, 99)),
        "max": max(values),
    }


def _without_list(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "latencies"}


def markdown(report: Mapping[str, Any]) -> str:
    device = report["device"]
    versions = ", ".join(f"{name} {version}" for name, version in report["software"].items())
    lines = [
        "# The policy server under nonsense, bad clients and load",
        "",
        f"    {report['command']}",
        "",
        f"{report['date']}, {device['device']} {device['name']}, {os.cpu_count()} CPU cores; {versions}.",
        "Client and server share the machine and talk over loopback; an observation is three 360 x 640",
        "cameras, 2.1 MB. Overhead is the client's whole wait less the policy's own time: packing, network,",
        f"decoding, checking and queueing. FLUX 3 Action ran with {' '.join(report['overrides'])}.",
        "",
        "| What | Result |",
        "|---|---|",
        *(f"| {name} | {result} |" for name, result in _rows(report).items()),
    ]
    return "\n".join(lines) + "\n"


def _rows(report: Mapping[str, Any]) -> dict[str, str]:
    bad, gone, neighbours = report["malformed"], report["disconnects"], report["bad_neighbours"]
    fair, memory, real = report["fairness"], report["growth"], report["flux3"]
    return {
        "malformed frames and bodies": f"{bad['refused']:,}, all refused in words",
        "their memory": f"{bad['growth_mib']:+.1f} MiB",
        "abrupt disconnects": f"{gone['count']}, {gone['growth_mib']:+.1f} MiB",
        "20 answers for the client after them": f"{gone['back_after_s']:.1f} s",
        "p50 of a client alone": f"{neighbours['alone']['p50']:.2f} ms",
        f"beside {HALF_OPEN} silent sockets and {SLOW_READERS} clients that don't read": (
            f"{neighbours['beside']['p50']:.2f} ms"
        ),
        "silent sockets are closed after": f"{neighbours['silent_closed_after_s']:.1f} s",
        f"{fair['clients']} clients at once": f"{fair['answers_per_s']:.0f} answers/s",
        "their p50 and p99": f"{fair['p50']:.1f} and {fair['p99']:.1f} ms",
        "least over most served": f"{fair['least_over_most']:.3f}",
        "requests in a row": f"{memory['requests']:,}, {memory['growth_mib']:+.1f} MiB",
        "overhead, policy that only checks, p50 and p99": _both(memory["overhead"]),
        "FLUX 3 Action, whole wait, p50 and p99": _both(real),
        "FLUX 3 Action, overhead over the bare pipeline, p50 and p99": _both(real["overhead"]),
    }


def _both(summary: Mapping[str, float]) -> str:
    return f"{summary['p50']:.2f} and {summary['p99']:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--frames", type=int, default=100_000, help="malformed frames and bodies")
    parser.add_argument("--requests", type=int, default=10_000, help="of the memory test")
    parser.add_argument("--disconnects", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the fairness test")
    parser.add_argument("--inferences", type=int, default=200, help="of FLUX 3 Action")
    args, overrides = parser.parse_known_args()
    overrides = overrides or ["accel=graph+fused"]
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python docs/benchmarks/serving.py OUT_FOLDER", *sys.argv[2:]]),
        "overrides": overrides,
        "software": software(),
    }
    with child([]) as server:
        report["malformed"] = malformed(server, args.frames)
        report["disconnects"] = disconnects(server, args.disconnects)
        report["bad_neighbours"] = bad_neighbours(server)
        report["fairness"] = fairness(server, args.seconds)
        report["growth"] = growth(server, args.requests)
    with child(overrides) as server:
        ask(server, 5)
        report["flux3"] = _without_list(ask(server, args.inferences))
    report["device"] = device_facts(str(choose_device("auto")))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "serving.json").write_text(json.dumps(report, indent=1))
    (args.out / "serving.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        main()
