"""Hub ids against a hub-shaped server on this machine; nothing leaves it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from accel.errors import CheckpointError
from pipelines.hub import Hub, HubId, resolve

COMMIT = "a" * 40
FILES = {
    "video_vae.safetensors": b"vae",
    "other.safetensors": b"other",
    "text_encoder/config.json": b"{}",
    "text_encoder/model.safetensors": b"text",
    "text_encoder/pytorch_model.bin": b"pickle",
    "text_encoder/onnx/model.safetensors": b"another text",
    "text_encoder/onnx/config.json": b"{}",
}


class HubHandler(BaseHTTPRequestHandler):
    """The few endpoints that huggingface_hub asks: repository `org/base`, branch `main`, tag `v1`."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models").lstrip("/")
        _, _, place = path.partition("org/base/")
        kind, _, rest = place.partition("/")
        revision, _, name = rest.partition("/")
        if not place:
            self.reply(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT):
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        elif kind == "revision":
            self.reply_json({"id": "org/base", "sha": COMMIT, "siblings": []})
        elif kind == "tree":
            rows = [{"type": "file", "path": p, "size": len(d), "oid": etag(d)} for p, d in FILES.items()]
            self.reply_json(rows)
        elif name in FILES:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(FILES[name])}"'}
            self.reply(200, headers, FILES[name], body=body)
        else:
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def reply_json(self, value: object) -> None:
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def reply(self, status: int, headers: dict[str, str], data: bytes = b"", *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield Hub(endpoint=f"http://127.0.0.1:{server.server_port}", cache_dir=tmp_path / "cache")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("org/base", HubId("org/base")),
        ("org/base@v1", HubId("org/base", None, "v1")),
        ("org/base:text_encoder@refs/pr/1", HubId("org/base", "text_encoder", "refs/pr/1")),
        ("org/base:a/b.safetensors@x:y@z", HubId("org/base", "a/b.safetensors", "x:y@z")),
    ],
)
def test_ids_split_at_the_first_at_then_the_first_colon(spec, parsed):
    assert HubId.parse(spec) == parsed


@pytest.mark.parametrize(
    "spec", ["./gone", "/gone/away", "../gone", "a/b/c", "org/base:../x", "", "a b/c", "org/base:*"]
)
def test_neither_path_nor_id(spec):
    with pytest.raises(CheckpointError, match="path"):
        resolve(spec)


def test_existing_local_path_wins_over_the_hub(tmp_path, monkeypatch):
    (tmp_path / "org/base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/base") == Path("org/base")
    assert resolve("org/base", default_file="f.safetensors") == Path("org/base/f.safetensors")


def test_relative_paths_are_tried_beside_the_package_first(tmp_path, monkeypatch):
    package, here = tmp_path / "package", tmp_path / "here"
    for folder in (package, here):
        folder.mkdir()
        (folder / "vae.safetensors").touch()
    monkeypatch.chdir(here)
    assert resolve("vae.safetensors", relative_to=[package]) == package / "vae.safetensors"
    (package / "vae.safetensors").unlink()
    assert resolve("vae.safetensors", relative_to=[package]) == Path("vae.safetensors")


@pytest.mark.parametrize(
    ("spec", "data"),
    [("org/base", b"vae"), ("org/base@v1", b"vae"), ("org/base:other.safetensors@v1", b"other")],
)
def test_downloads_one_file(hub, spec, data):
    assert resolve(spec, default_file="video_vae.safetensors", hub=hub).read_bytes() == data


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("org/base:text_encoder", ["config.json", "model.safetensors"]),
        ("org/base", ["other.safetensors", "video_vae.safetensors"]),
    ],
)
def test_downloads_one_folder_without_pickles_and_what_lies_below(hub, spec, names):
    folder = resolve(spec, hub=hub)
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("org/gone", "no such repository"),
        ("org/base@v9", "no such revision"),
        ("org/base:gone.safetensors", "no such file"),
    ],
)
def test_hub_refusals_are_told_apart(hub, spec, fault):
    with pytest.raises(CheckpointError, match=f"'org/.*{fault}"):
        resolve(spec, default_file="video_vae.safetensors", hub=hub)


def test_the_home_of_nobody_holds_nothing(hub):
    with pytest.raises(CheckpointError, match="~no-such-user"):
        resolve("~no-such-user/base", hub=hub)


def test_missing_subfolder(hub):
    with pytest.raises(CheckpointError, match="'org/base:gone': no model files there"):
        resolve("org/base:gone", hub=hub)


@pytest.mark.parametrize("default_file", [None, "video_vae.safetensors"])
def test_offline_says_so_unless_cached(hub, default_file):
    unreachable = Hub(endpoint="http://127.0.0.1:9", cache_dir=hub.cache_dir)
    with pytest.raises(CheckpointError, match="can't be reached"):
        resolve("org/base", default_file=default_file, hub=unreachable)
    online = resolve("org/base", default_file=default_file, hub=hub)
    assert resolve("org/base", default_file=default_file, hub=unreachable) == online
