"""Replay an episode with the stock client; needs a server (task=serve) and openpi-client."""

import json
import time
from pathlib import Path

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from PIL import Image

folder = Path("data/panda_lift")
episode = json.loads((folder / "episode.json").read_text())
policy = WebsocketClientPolicy("127.0.0.1", 8000)
print(policy.get_server_metadata())
for frame in episode["frames"][:10]:
    images = {
        f"observation.images.{c}": np.asarray(Image.open(folder / f)) for c, f in frame["images"].items()
    }
    state = np.asarray(frame["state"], np.float32)
    begin = time.perf_counter()
    answer = policy.infer({**images, "observation.state": state, "prompt": episode["prompt"]})
    print(f"{(time.perf_counter() - begin) * 1e3:.1f} ms", answer["actions"].shape, answer["actions"][0])
