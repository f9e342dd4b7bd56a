"""Answers as messages (spec sections 14.1 and 14.2)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tasks.serving.calls import OutputFormat
from tasks.serving.service import Reply

_STAGES = ("preprocess_ms", "text_ms", "observation_ms", "denoise_ms", "postprocess_ms")


def raw(reply: Reply, *, output_format: OutputFormat) -> dict[str, Any]:
    """request_id, actions, parameters, timings, cache and server_timing; see `server_timing`."""
    message = {
        "request_id": reply.call.request_id,
        "actions": _actions(reply, output_format),
        "parameters": {"num_inference_steps": reply.answer.steps},
        "timings": {name: reply.timings[name] for name in _STAGES if name in reply.timings},
        "cache": _cache(reply),
        "server_timing": server_timing(reply),
    }
    if not reply.call.runtime.return_timing:
        del message["timings"]
    return message


def generation(reply: Reply, *, model: str, output_format: OutputFormat) -> dict[str, Any]:
    """`raw`, or the same inside the generic shape of a generation, as the call asks."""
    parts = raw(reply, output_format=output_format)
    if reply.call.runtime.response_format == "raw":
        return parts
    actions = parts.pop("actions")
    horizon, width = reply.answer.actions.shape
    action = {"type": "continuous", "dtype": "float32", "shape": [horizon, width], "values": actions}
    return {
        "id": parts.pop("request_id"),
        "object": "action.generation",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": 0, "input_index": 0, "candidate_index": 0, "action": action}],
        "usage": {
            "batch_size": 1,
            "action_horizon": horizon,
            "action_dim": width,
            "denoise_steps": reply.answer.steps,
            "prefix_cache_hit": bool(reply.answer.caption_cached),
        },
        **parts,
    }


def robolab(reply: Reply) -> dict[str, Any]:
    """`action` in the singular, and the request's id, which its clients don't mind."""
    return {
        "request_id": reply.call.request_id,
        "action": reply.answer.actions,
        "server_timing": server_timing(reply),
    }


def server_timing(reply: Reply) -> Mapping[str, float]:
    """Milliseconds of every stage, of the queue, and of the whole time in the worker (`infer_ms`)."""
    return dict(reply.timings)


def _actions(reply: Reply, output_format: OutputFormat) -> Any:
    """float32 (K, A), or the same numbers in nested lists: doubles that read back as the same float32."""
    return reply.answer.actions if output_format == "numpy" else reply.answer.actions.tolist()


def _cache(reply: Reply) -> dict[str, Any]:
    cached = reply.answer.caption_cached
    return {"enabled": cached is not None, "hit": bool(cached), "scope": "caption", "mode": "exact"}
