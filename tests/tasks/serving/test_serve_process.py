"""The task as a process of its own: from the configuration to answers, and SIGTERM."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import httpx
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from serving_harness import WAIT_S

from tasks.config import ROOT

# The stock client uses a form of `connect` that its library no longer recommends.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")

PROGRAM = """
import logging, sys
from dataclasses import replace
from pathlib import Path
from tasks import serve
from tasks.config import compose
from tasks.serving.settings import ServeTask

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
config = compose(
    "accel=eager", "size=tiny", "device=cpu", "logger=quiet", "model.steps=1", "model.guidance=1.0",
    "model.guidance_action=1.0",
)
task = ServeTask(name="serve", port=0, warm_up_prompts=["open the drawer"])
serve.main(replace(config, task=task), folder=Path("unused"))
"""


def test_serves_until_sigterm_and_ends_with_0() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            found = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in process.stdout)
            address = next(match for match in found if match)
            client = WebsocketClientPolicy(
                "127.0.0.1", int(address[1])
            )  # its metadata come after the warm-up
            assert client.get_server_metadata()["output"]["action_horizon"] == 32
            assert httpx.get(f"{address[0]}/readyz", timeout=WAIT_S).status_code == 200
            assert 'stage="denoising"' in httpx.get(f"{address[0]}/metrics", timeout=WAIT_S).text
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0, process.stdout.read()
        finally:
            process.kill()
    assert not (ROOT / "unused").exists()
