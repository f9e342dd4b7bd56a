"""msgpack from and to strangers: every spelling of an array, and every way to lie about one."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays
import msgpack
import numpy as np
import openpi_client.msgpack_numpy as openpi
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.serving.codec import Limits, decode, encode
from tasks.serving.errors import InvalidRequestError, TooLargeError

C20 = Path(__file__).parent / "C20_frames"
LIMITS = Limits(bytes=2**20)


def frame(**fields: Any) -> bytes:
    """A message whose one value is a map with these keys, as bytes."""
    return msgpack.packb({"x": {key.encode(): value for key, value in fields.items()}})


def array(data: Any = b"\0" * 8, dtype: Any = "<f4", shape: Any = (2,)) -> bytes:
    return frame(__ndarray__=True, data=data, dtype=dtype, shape=shape)


def plain(value: Any) -> Any:
    """In the notation of the golden file."""
    if isinstance(value, np.ndarray):
        return {"ndarray": value.tolist(), "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return {"scalar": value.item(), "dtype": value.dtype.str}
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["openpi_observation", "openpi_response"])
def test_golden_frames_both_ways(name: str, golden_json) -> None:
    row = golden_json("protocol.json")[name]
    data = bytes.fromhex(row["frame_hex"])
    value = decode(data, LIMITS)
    assert plain(value) == row["decoded"]
    assert encode(value) == data


@pytest.mark.parametrize("path", sorted(C20.glob("*.msgpack")), ids=lambda path: path.stem)
def test_spellings_of_an_array(path: Path) -> None:
    expected = json.loads((C20 / "expected.json").read_text())
    value = decode(path.read_bytes(), LIMITS)
    image, state = value["observation/image"], value["observation/state"]
    assert (image.dtype.name, list(image.shape)) == (expected["image_dtype"], expected["image_shape"])
    assert (int(image.sum()), image[1, 2].tolist()) == (expected["image_sum"], expected["image_1_2"])
    assert (state.dtype.name, state.tolist()) == (expected["state_dtype"], expected["state"])
    assert (value["prompt"], int(value["step"])) == (expected["prompt"], expected["step"])


def test_bytes_of_an_array_are_copied_once() -> None:
    image = np.arange(2**20, dtype=np.uint8).reshape(2**10, 2**10)
    data = encode({"image": image})
    tracemalloc.start()
    try:
        decoded = decode(data, Limits())["image"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(decoded, image)
    assert peak < 1.5 * image.nbytes
    assert not decoded.flags.writeable


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda key: key not in ("nd", "__ndarray__", "__npgeneric__")),
        st.one_of(
            arrays.arrays(
                st.sampled_from(["<f4", ">f8", "|u1", "<i8", ">i2", "|b1", "<f2"]),
                arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
            ),
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**63 - 1)
            | st.floats()
            | st.text()
            | st.binary(),
        ),
        max_size=5,
    )
)
@settings(max_examples=300, deadline=None)
def test_equal_bytes_with_the_stock_client_and_back(value: dict[str, Any]) -> None:
    data = encode(value)
    assert data == openpi.packb(value)
    assert encode(decode(data, LIMITS)) == data


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (array(dtype="|O"), "dtype"),
        (array(dtype="<c8"), "dtype"),
        (array(dtype="|V8"), "dtype"),
        (array(dtype="<U2"), "dtype"),
        (array(dtype="<M8[s]"), "dtype"),
        (array(dtype="f4,f4"), "dtype"),
        (array(dtype=[["a", "<f4"]]), "dtype"),
        (array(dtype="<f16"), "dtype"),
        (array(dtype=4), "dtype"),
        (array(shape=(-2,)), "whole numbers from 0"),
        (array(shape=(True, 2)), "whole numbers from 0"),
        (array(shape=(2.0,)), "whole numbers from 0"),
        (array(shape=2), "shape"),
        (array(shape=[1] * 9 + [2]), "shape"),
        (array(shape=(3,)), "takes 12 bytes, 8 were sent"),
        (array(shape=(2**31, 2**31, 2**31)), "beyond"),
        (array(shape=(0, 2**62)), "beyond"),
        (array(data="text"), "data is str"),
        (array(data=[1, 2]), "data is list"),
        (frame(__ndarray__=False, data=b"", dtype="<f4", shape=(0,)), "__ndarray__"),
        (frame(__ndarray__=1, data=b"", dtype="<f4", shape=(0,)), "__ndarray__"),
        (frame(__ndarray__=True, data=b""), "__ndarray__"),
        (frame(__ndarray__=True, data=b"", dtype="<f4", shape=(0,), order="F"), "__ndarray__"),
        (frame(__npgeneric__=True, data=300, dtype="|u1"), "beyond uint8"),
        (frame(__npgeneric__=True, data=1e40, dtype="<f4"), "beyond float32"),
        (frame(__npgeneric__=True, data="1", dtype="<f4"), "str is no float32"),
        (frame(__npgeneric__=True, data=1.5, dtype="<i8"), "float is no int64"),
        (frame(nd=True, type="<f4", kind="O", shape=(1,), data=b"\x80\x04."), "kind"),
        (frame(nd=True, type="<f4", kind="V", shape=(1,), data=b"1234"), "kind"),
        (frame(complex=True, data=b"(1+2j)", nd=False), "nd"),
        (msgpack.packb([1]), "send a map"),
        (msgpack.packb({1: 2}), "key 1 is int"),
        (msgpack.packb({b"state": 2}), "key b'state' is bytes"),
        (b"\x82\xa1a\x01\xa1a\x02", "appears twice"),
        (b"\x81\xa1a\xa1\xff", "utf-8"),
        (b"\x81\xa1a\xd6\xff\0\0\0\0", "ext"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"x")}), "ext"),
        (b"", "no msgpack"),
        (b"\x81\xa1a", "no msgpack"),
        (msgpack.packb({}) + b"\0", "extra data"),
        (b"\x81\xa1a" + b"\x91" * 40 + b"\xc0", "nested too deeply"),
        (b"\x81\xa1a" * 40 + b"\xc0", "nested too deeply"),
        (b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0", "no msgpack"),
    ],
)
def test_refusals_say_what_is_wrong(data: bytes, told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(data, LIMITS)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_size_is_checked_before_anything_is_read() -> None:
    with pytest.raises(TooLargeError, match="at most 4 are taken"):
        decode(b"\x81\xa1a\x01\x02", Limits(bytes=4))


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa1a\xdc\xff\xff" + b"\x90" * 65535,
        b"\x81\xa1a" + b"\xdc\xff\xff" * 300,
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=["many_lists", "nested_headers", "long_list", "long_bytes", "long_map"],
)
def test_memory_is_bounded_by_what_was_sent_and_the_limits(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            decode(data, Limits(items=2**15))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 * 2**20


@given(st.binary(max_size=200))
@settings(max_examples=1500, deadline=None)
def test_random_bytes_are_read_or_refused(data: bytes) -> None:
    _read_or_refuse(data)


@given(st.data())
@settings(max_examples=600, deadline=None)
def test_damaged_frames_are_read_or_refused(data: st.DataObject) -> None:
    good = bytearray((C20 / "openpi_client.msgpack").read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=4)):
        good[position] = data.draw(st.integers(0, 255))
    _read_or_refuse(bytes(good[: data.draw(st.integers(0, len(good)))]))


@given(
    st.recursive(
        st.one_of(
            st.sampled_from(["|O", "<f4", "|u1", ">i8", "f4,f4", "", b"<f4"]),
            st.binary(max_size=16),
            st.integers(-3, 2**64 - 1),
            st.booleans(),
            st.floats(),
            st.none(),
        ),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "__ndarray__",
                        b"__ndarray__",
                        b"__npgeneric__",
                        "nd",
                        b"nd",
                        b"data",
                        "data",
                        b"dtype",
                        b"shape",
                        "shape",
                        b"type",
                        b"kind",
                        "state",
                    ]
                ),
                inner,
                max_size=6,
            )
        ),
        max_leaves=12,
    )
)
@settings(max_examples=400, deadline=None)
def test_maps_full_of_markers_are_read_or_refused(value: Any) -> None:
    _read_or_refuse(msgpack.packb({"x": value}))


def _read_or_refuse(data: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):  # any other error fails the test
        _assert_harmless(decode(data, LIMITS))


def _assert_harmless(value: Any) -> None:
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        for child in value.values():
            _assert_harmless(child)
    elif isinstance(value, list):
        for child in value:
            _assert_harmless(child)
    elif isinstance(value, np.ndarray | np.generic):
        assert value.dtype.kind in "biuf"
    else:
        assert value is None or isinstance(value, bool | int | float | str | bytes)
