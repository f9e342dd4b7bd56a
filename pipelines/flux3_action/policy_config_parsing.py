"""The JSON of a native policy config -> `PolicyConfig`, by the rules of spec section 3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from accel.errors import CheckpointError
from pipelines.flux3_action.policy_config import (
    CONTENT_STREAMS,
    LATENT_CHANNELS,
    CameraLayout,
    PolicyConfig,
    QuantileStats,
    Sampler,
    TransformerConfig,
)
from pipelines.number_types import Count, NonNegative, Positive

Name = Annotated[str, Meta(min_length=1)]

_MIN_CANVAS = 160  # pixels: the VAE's attention window needs 5 positions at its coarsest grid
_CAMERA_COUNTS = {"droid": 3, "single": 1, "side_by_side": 2}


class _DitConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    vec_in_dim: Count | None = 768
    context_in_dim: Count = 20480
    hidden_size: Count = 3072
    num_heads: Count = 24
    depth: Count = 5
    depth_single_blocks: Count = 28
    axes_dim: tuple[Count, ...] = (32, 32, 32, 32)
    theta: Positive = 10000.0
    mlp_ratio: Positive = 3.0
    in_channels: dict[str, Count] = msgspec.field(
        default_factory=lambda: dict.fromkeys(CONTENT_STREAMS, LATENT_CHANNELS)
    )
    sequence: dict[str, str] = {}
    attn_mode: Any = None
    depth_late_blocks: int | None = 0
    qkv_bias: bool | None = False
    gate_type: str | None = None


class _Stats(Struct):
    q01: tuple[float, ...]
    q99: tuple[float, ...]


class _NativeConfig(Struct, kw_only=True):
    """Field for field what the file holds; unknown keys are training settings and ignored."""

    action_modality: Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]*\Z")]
    action_dim: Count
    chunk_size: Count
    gripper_flip_dims: tuple[int, ...]
    conditioning_channels: Count | None = None
    n_action_steps: Count = 32
    camera_layout: CameraLayout = "droid"
    camera_keys: tuple[Name, ...] = ("images.wrist", "images.left", "images.right")
    canvas_hw: tuple[Count, Count] = (544, 736)
    fps: Positive = 15.0
    action_scale: Positive = 2.0
    action_parameterization: Literal["absolute", "joint_delta"] = "absolute"
    absolute_action_dims: tuple[int, ...] = ()
    action_normalization: _Stats | None = None
    state_normalization: _Stats | None = None
    normalization_clip: Positive = 6.0
    content_streams: tuple[str, ...] | None = None
    dit_config: _DitConfig | None = None
    torch_dtype: Literal["bfloat16"] = "bfloat16"
    quantization: Literal["fp8r"] | None = None
    inference_profile: str = "default"
    sampler: Sampler | None = None
    num_inference_steps: Count | None = None
    guidance_scale: NonNegative | None = None
    guidance_scale_action: NonNegative | None = None
    sampler_shift: Positive | None = None
    inference_seed: Annotated[int, Meta(ge=0)] = 0
    single_frame_encode: bool = True
    video_vae_id: str = ""
    text_encoder_id: str = ""
    text_output_layers: tuple[Annotated[int, Meta(ge=0)], ...] = (4, 8, 12, 16, 20, 24, 28, 32)


def parse_policy_config(raw: Mapping[str, Any]) -> PolicyConfig:
    """Check a native config and fill its defaults.

    raw: the JSON object. One key beyond spec section 3 is understood: `text_output_layers`, the
        language-model layers whose inputs form the text context.
    Raises: CheckpointError naming the key and the rule.
    """
    try:
        native = msgspec.convert(dict(raw), _NativeConfig)
    except msgspec.ValidationError as error:
        raise _fault(str(error)) from error
    _check_finite(raw)
    _check_profile(native)
    _check_cameras(native)
    _check_action_space(native)
    return PolicyConfig(
        action_modality=native.action_modality,
        action_dim=native.action_dim,
        chunk_size=native.chunk_size,
        camera_layout=native.camera_layout,
        camera_keys=native.camera_keys,
        canvas_hw=native.canvas_hw,
        transformer=_transformer(native),
        n_action_steps=native.n_action_steps,
        fps=native.fps,
        action_scale=native.action_scale,
        gripper_flip_dims=native.gripper_flip_dims,
        action_parameterization=native.action_parameterization,
        absolute_action_dims=native.absolute_action_dims,
        action_normalization=_stats("action_normalization", native.action_normalization, native.action_dim),
        state_normalization=_stats("state_normalization", native.state_normalization, native.action_dim),
        normalization_clip=native.normalization_clip,
        quantization=native.quantization,
        sampler=native.sampler or "cosmos_unipc",
        num_inference_steps=native.num_inference_steps or 4,
        guidance_scale=1.0 if native.guidance_scale is None else native.guidance_scale,
        guidance_scale_action=native.guidance_scale_action,
        sampler_shift=native.sampler_shift or 1.0,
        inference_seed=native.inference_seed,
        video_vae_id=native.video_vae_id,
        text_encoder_id=native.text_encoder_id,
        text_output_layers=native.text_output_layers,
        notes=_notes(native),
    )


def _check_profile(native: _NativeConfig) -> None:
    _require(
        native.inference_profile == "default",
        f"inference_profile '{native.inference_profile}' is not supported, only 'default'",
    )
    streams = CONTENT_STREAMS if native.content_streams is None else native.content_streams
    _require(
        sorted(streams) == sorted(CONTENT_STREAMS),
        f"content_streams {list(streams)} is not supported, only {list(CONTENT_STREAMS)}",
    )
    _require(native.chunk_size % 4 == 0, f"chunk_size {native.chunk_size} must be a multiple of 4")


def _check_cameras(native: _NativeConfig) -> None:
    layout, (height, width) = native.camera_layout, native.canvas_hw
    names = [key.removeprefix("images.") for key in native.camera_keys]
    count = _CAMERA_COUNTS.get(layout, max(1, len(names)))
    _require(len(names) == count, f"camera_layout '{layout}' takes {count} camera_keys, not {len(names)}")
    _require(len(set(names)) == len(names), f"camera_keys {list(native.camera_keys)} name a camera twice")
    _require(
        height % 32 == 0 and width % 32 == 0 and min(height, width) >= _MIN_CANVAS,
        f"canvas_hw {[height, width]} must be multiples of 32 and at least {_MIN_CANVAS}",
    )
    _require(
        layout != "droid" or (height, width) == (544, 736),
        f"canvas_hw {[height, width]} must be [544, 736] for camera_layout 'droid'",
    )


def _check_action_space(native: _NativeConfig) -> None:
    width = native.action_dim
    _require(
        native.action_modality not in ("txt", *CONTENT_STREAMS),
        f"action_modality '{native.action_modality}' is the name of another stream",
    )
    _require(
        native.conditioning_channels in (None, width),
        f"conditioning_channels {native.conditioning_channels} must equal action_dim {width}: "
        "past actions are not conditioned on",
    )
    for key in ("gripper_flip_dims", "absolute_action_dims"):
        dims: Sequence[int] = getattr(native, key)
        _require(
            all(-width <= dim < width for dim in dims) and len({dim % width for dim in dims}) == len(dims),
            f"{key} {list(dims)} must be different channels of {width}",
        )


def _transformer(native: _NativeConfig) -> TransformerConfig:
    dit = native.dit_config or _DitConfig()
    for key in ("depth_late_blocks", "qkv_bias", "gate_type"):
        value = getattr(dit, key)
        _require(not value, f"dit_config.{key} {value!r} is not supported")
    _require(
        dit.hidden_size % dit.num_heads == 0,
        f"dit_config.hidden_size {dit.hidden_size} must be a multiple of num_heads {dit.num_heads}",
    )
    head_dim = dit.hidden_size // dit.num_heads
    _require(
        sum(dit.axes_dim) == head_dim
        and len(dit.axes_dim) == 4
        and all(dim % 2 == 0 for dim in dit.axes_dim),
        f"dit_config.axes_dim {list(dit.axes_dim)} must be four even numbers with sum {head_dim}",
    )
    _require(int(dit.hidden_size * dit.mlp_ratio) >= 1, f"dit_config.mlp_ratio {dit.mlp_ratio} is too small")
    missing = [stream for stream in CONTENT_STREAMS if stream not in dit.in_channels]
    _require(not missing, f"dit_config.in_channels lacks {missing}")
    for stream in CONTENT_STREAMS:
        channels = dit.in_channels[stream]
        _require(
            channels == LATENT_CHANNELS,
            f"dit_config.in_channels.{stream} {channels} must be {LATENT_CHANNELS}, "
            "the channels of the video latents",
        )
    renamed = [key for key, stream in dit.sequence.items() if key != f"x_{stream}"]
    _require(not renamed, f"dit_config.sequence: {renamed} must map x_<name> to <name>")
    modality = native.action_modality
    return TransformerConfig(
        in_channels={
            **dict.fromkeys(CONTENT_STREAMS, LATENT_CHANNELS),
            modality: native.action_dim,
            f"{modality}_cond": native.action_dim,
        },
        vec_in_dim=dit.vec_in_dim,
        context_in_dim=dit.context_in_dim,
        hidden_size=dit.hidden_size,
        num_heads=dit.num_heads,
        depth=dit.depth,
        depth_single_blocks=dit.depth_single_blocks,
        axes_dim=dit.axes_dim,
        theta=dit.theta,
        mlp_ratio=dit.mlp_ratio,
    )


def _stats(key: str, stats: _Stats | None, width: int) -> QuantileStats | None:
    if stats is None:
        return None
    _require(len(stats.q01) == len(stats.q99) == width, f"{key}: q01 and q99 need {width} values each")
    return QuantileStats(q01=stats.q01, q99=stats.q99)


def _notes(native: _NativeConfig) -> tuple[str, ...]:
    notes = []
    if not native.single_frame_encode:
        notes.append("single_frame_encode is false in the package; the single frame is encoded all the same")
    if native.n_action_steps > native.chunk_size:
        notes.append(
            f"n_action_steps {native.n_action_steps} exceeds the {native.chunk_size} actions of a chunk"
        )
    return tuple(notes)


def _check_finite(value: Any, where: str = "") -> None:
    if isinstance(value, float):
        _require(math.isfinite(value), f"{where or 'value'} {value} must be finite")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_finite(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            _check_finite(item, where)


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise _fault(fault)


def _fault(what: str) -> CheckpointError:
    return CheckpointError(f"policy config: {what}. Use a package made for this model.")
