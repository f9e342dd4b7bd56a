"""JSON and forms: arrays and images in their spellings, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import struct
import tracemalloc
import zlib
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from accel.errors import ObservationError
from pipelines.flux3_action.arrays import real_array
from tasks.serving.bodies import MAX_PARTS, read_body
from tasks.serving.calls import call_from
from tasks.serving.codec import Limits
from tasks.serving.errors import InvalidRequestError, TooLargeError, UnsupportedFormatError
from tasks.serving.json_codec import array_value, decode_json, image_from, pixels_from_list

LIMITS = Limits(bytes=2**20)
RED = np.full((3, 5, 3), (200, 10, 7), np.uint8)


def png(pixels: np.ndarray = RED) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def form(**options: Any) -> tuple[bytes, str]:
    request = httpx.Request("POST", "http://host", **options)
    return request.read(), request.headers["content-type"]


def test_golden_pixel_lists(golden_json) -> None:
    for row in golden_json("protocol.json")["json_pixel_lists"]:
        pixels = pixels_from_list(row["value"])
        assert (None if pixels is None else pixels.dtype.str) == row["dtype"], row
        if pixels is not None:
            assert pixels.tolist() == row["value"]


@pytest.mark.parametrize(
    "value",
    [
        RED.tolist(),
        png(),
        base64.b64encode(png()).decode(),
        "data:image/png;base64," + base64.b64encode(png()).decode(),
        {"b64_json": base64.b64encode(png()).decode()},
        {"base64": base64.b64encode(png()).decode()},
        {"values": RED.tolist(), "dtype": "uint8", "shape": [3, 5, 3]},
        {"values": RED.reshape(-1).tolist(), "dtype": "|u1", "shape": [3, 5, 3]},
        {"data": base64.b64encode(RED.tobytes()).decode(), "dtype": "uint8", "shape": [3, 5, 3]},
        {"data": RED.tobytes(), "dtype": "uint8", "shape": [3, 5, 3]},
        RED,
    ],
    ids=["list", "png", "text", "data_url", "b64_json", "base64", "values", "flat", "data", "bytes", "array"],
)
def test_spellings_of_an_image(value: Any) -> None:
    image = image_from(value, camera="wrist", limits=LIMITS)
    assert np.array_equal(np.asarray(image), RED)
    assert np.asarray(image).dtype == np.uint8


def huge_png(side: int) -> bytes:
    """A file of a few bytes that claims side x side pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + png()[33:]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("not base64!", "base64"),
        ("", "no readable image"),
        (base64.b64encode(b"GIF89a").decode(), "no readable image"),
        (png()[:45], "no readable image"),
        (huge_png(60000), "more than 16777216 pixels"),
        (huge_png(6000), "more than 16777216 pixels"),
        ({"base64": 3}, "int instead of text"),
        ({"base64": "", "extra": 1}, "send values or data"),
        ({"values": [1, 2], "dtype": "object", "shape": [2]}, "dtype"),
        ({"values": [1, 2], "dtype": "uint8", "shape": [3]}, "takes 3 bytes, 2 were sent"),
        ({"values": [1, 300], "dtype": "uint8", "shape": [2]}, "can't be held by uint8"),
        ({"values": [1.5], "dtype": "uint8", "shape": [1]}, "can't be held by uint8"),
        ({"values": [[1], [2, 3]], "dtype": "uint8", "shape": [3]}, "rows of equal length"),
        ({"values": ["a"], "dtype": "uint8", "shape": [1]}, "not numbers"),
        ([[1, 2], [3, 4]], "rows of pixels"),
        ([[[1, 2], [3]]], "rows of pixels"),
        (["a.png"], "rows of pixels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images_that_are_none_are_refused_with_their_camera(value: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match="camera 'wrist'") as caught:
        image_from(value, camera="wrist", limits=LIMITS)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no JSON"),
        (b"[1]", "send an object"),
        (b'{"a":1,"a":2}', "appears twice"),
        (b'{"a":NaN}', "NaN is no JSON number"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":"\xff"}', "no JSON"),
        (rb'{"a":"\ud83e"}', "can't encode character"),
        (rb'{"a":{"\uDD16":1}}', "can't encode character"),
        ('{"a":1}'.encode("utf-16"), "no JSON"),
        (b'{"a":' + b"[" * 30 + b"]" * 30 + b"}", "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"a":[' + b"[]," * 200_000 + b"[]]}", "values"),
    ],
)
def test_refused_json(data: bytes, told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_json(data, Limits(bytes=2**21, items=2**17 if data.endswith(b"[]]}") else 2**22))
    assert told in str(caught.value)


def test_pairs_of_surrogates_are_text() -> None:
    assert decode_json(rb'{"a":"\ud83e\udd16 \\ud83e"}', LIMITS) == {"a": "\N{ROBOT FACE} \\ud83e"}


def test_sizes_and_formats() -> None:
    with pytest.raises(TooLargeError):
        read_body(b"{}    ", content_type="application/json", limits=Limits(bytes=4))
    with pytest.raises(UnsupportedFormatError, match="text/html"):
        read_body(b"{}", content_type="text/html; charset=utf-8", limits=LIMITS)


@pytest.mark.parametrize(
    "read",
    [
        lambda texts: image_from(texts, camera="wrist", limits=LIMITS),
        lambda texts: image_from([texts[:1], *[np.zeros(1)] * 2**10], camera="wrist", limits=LIMITS),
        lambda texts: array_value({"values": texts, "dtype": "uint8", "shape": [1]}, LIMITS),
        lambda texts: real_array(texts, name="state", what="numbers"),
    ],
    ids=["pixels", "mixed", "values", "state"],
)
@pytest.mark.parametrize("text", ["a", b"a"])
def test_one_long_text_does_not_take_its_memory_for_every_entry(read: Any, text: Any) -> None:
    texts = [text * 2**16] + [text] * 2**10
    tracemalloc.start()
    try:
        with pytest.raises((InvalidRequestError, ObservationError)):
            read(texts)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_form_with_image_files() -> None:
    request = json.dumps({"state": [1, 2], "prompt": "go", "runtime": {"response_format": "raw"}})
    body, content_type = form(
        data={"request": request}, files={"wrist": ("w.png", png()), "left": ("l.png", png())}
    )
    call = call_from(read_body(body, content_type=content_type, limits=LIMITS), LIMITS)
    assert call.observation["state"] == [1, 2]
    assert call.runtime.response_format == "raw"
    for camera in ("wrist", "left"):
        assert np.array_equal(np.asarray(call.observation[f"observation.images.{camera}"]), RED)


def test_large_files_of_a_form_arrive_whole() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)
    body, content_type = form(files={"wrist": ("w.png", png(noise))})
    assert len(body) > 2**20
    message = read_body(body, content_type=content_type, limits=Limits())
    assert message["observation.images.wrist"] == png(noise)


@pytest.mark.parametrize(
    ("body", "content_type", "told"),
    [
        (b"", "multipart/form-data", "no multipart form"),
        (b"--x\r\n\r\n", "multipart/form-data; boundary=x", "no multipart form"),
        (
            b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb",
            "multipart/form-data; boundary=x",
            "too early",
        ),
        (form(data={"request": "{"}, files={"a": b""})[0], None, "no JSON"),
        (form(files=[("a", b"1"), ("a", b"2")])[0], None, "appears twice"),
        (form(files={str(n): b"1" for n in range(MAX_PARTS + 1)})[0], None, f"more than {MAX_PARTS}"),
    ],
)
def test_refused_forms(body: bytes, content_type: str | None, told: str) -> None:
    if content_type is None:
        boundary = body[2:].partition(b"\r")[0].decode()
        content_type = f"multipart/form-data; boundary={boundary}"
    with pytest.raises(InvalidRequestError) as caught:
        read_body(body, content_type=content_type, limits=LIMITS)
    assert told in str(caught.value)


GOOD_FORM, GOOD_TYPE = form(data={"request": '{"state": [1]}'}, files={"wrist": ("w.png", png())})
GOOD_JSON = (
    b'{"input":{"images":{"wrist":{"values":[[[1,2,3]]],"dtype":"uint8","shape":[1,1,3]}},"state":[1]}}'
)


@given(st.data(), st.sampled_from([(GOOD_FORM, GOOD_TYPE), (GOOD_JSON, "application/json")]))
@settings(max_examples=600, deadline=None)
def test_damaged_bodies_are_read_or_refused(data: st.DataObject, good: tuple[bytes, str]) -> None:
    body = bytearray(good[0])
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=4)):
        body[position] = data.draw(st.integers(0, 255))
    cut = bytes(body[: data.draw(st.integers(0, len(body)))])
    with contextlib.suppress(InvalidRequestError):  # any other error fails the test
        call = call_from(read_body(cut, content_type=good[1], limits=LIMITS), LIMITS)
        assert all(isinstance(key, str) for key in call.observation)
