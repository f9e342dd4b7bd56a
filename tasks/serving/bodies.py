"""HTTP bodies: JSON, msgpack, or a form with image files."""

from __future__ import annotations

import logging
from typing import Any

from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, parse_options_header

from tasks.serving.codec import Limits, decode
from tasks.serving.errors import InvalidRequestError, UnsupportedFormatError
from tasks.serving.json_codec import decode_json

# It warns of every malformed form, which any client can send by the million; the answer says it already.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

MSGPACK = "application/msgpack"
MAX_PARTS = 32
BODY_PART = "request"
"""Part of a form that holds the JSON body; every other part is the image file of the camera of its name."""


def read_body(body: bytes, *, content_type: str, limits: Limits) -> dict[str, Any]:
    """Decode by content type; an empty one is JSON.

    Raises: ServingError saying what is wrong with the bytes.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if "msgpack" in kind:
        return decode(body, limits)
    if kind in ("", "application/json"):
        return decode_json(body, limits)
    if kind == "multipart/form-data":
        return _read_form(body, content_type, limits)
    raise UnsupportedFormatError(
        f"content-type {kind:.60}: send application/json, {MSGPACK} or multipart/form-data"
    )


def _read_form(body: bytes, content_type: str, limits: Limits) -> dict[str, Any]:
    parts = _parts(body, content_type)
    message = decode_json(parts.pop(BODY_PART, b"{}"), limits)
    observation = message.get("input", message)
    if not isinstance(observation, dict):
        raise InvalidRequestError("input: send an object beside image files")
    for camera, content in parts.items():
        key = f"observation.images.{camera}"
        if key in observation:
            raise InvalidRequestError(f"body: camera '{camera:.40}' stands in the JSON and in the form")
        observation[key] = content
    return message


def _parts(body: bytes, content_type: str) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    ended = False

    def keep(name: bytes | None, content: bytes) -> None:
        text = (name or b"").decode("utf-8", "replace")
        if text in parts or len(parts) == MAX_PARTS:
            raise InvalidRequestError(
                f"body: part '{text:.40}' appears twice, or more than {MAX_PARTS} parts"
            )
        parts[text] = content

    def keep_file(file: File) -> None:
        file.file_object.seek(0)
        keep(file.field_name, file.file_object.read())

    def keep_field(field: Field) -> None:
        keep(field.field_name, field.value or b"")

    def end() -> None:
        nonlocal ended
        ended = True

    _, options = parse_options_header(content_type)
    try:
        parser = FormParser(
            "multipart/form-data",
            keep_field,
            keep_file,
            on_end=end,
            boundary=options.get(b"boundary"),
            config={"MAX_MEMORY_FILE_SIZE": len(body) + 1},  # nothing is written to disk
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequestError(f"body: no multipart form ({error!s:.80})") from None
    if not ended:
        raise InvalidRequestError("body: the multipart form ends too early")
    return parts
