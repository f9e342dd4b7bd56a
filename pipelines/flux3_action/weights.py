"""Everything a FLUX 3 Action pipeline is made of, loaded from a package or drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.errors import CheckpointError
from pipelines.checkpoint import Checkpoint, load_into, open_checkpoint
from pipelines.device_memory import module_bytes, require_fits
from pipelines.flux3_action.package import PACKAGE_FILES, read_package, variant_subfolder
from pipelines.flux3_action.policy_config import LATENT_CHANNELS, PolicyConfig
from pipelines.flux3_action.synthetic import Size, droid_config, fill_synthetic, video_encoder_config
from pipelines.flux3_action.text_encoder import (
    CaptionEncoder,
    PaddingPositions,
    qwen3_vl_4b_config,
    read_text_config,
    text_key_prefix,
    tiny_text_config,
    unused_text_keys,
)
from pipelines.flux3_action.tokenizer import CaptionTokenizer, build_tiny_tokenizer
from pipelines.flux3_action.transformer import ActionTransformer
from pipelines.flux3_action.video_vae import VideoEncoder, VideoEncoderConfig
from pipelines.flux3_action.video_vae_architecture import read_video_encoder_config
from pipelines.hub import Hub, HubId, resolve
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.weights_config import WeightsConfig

_DIT_PREFIX = "dit."
_PER_STREAM = (
    "emb_in",
    "early_stream_modulations",
    "single_stream_modulations",
    "content_mode_blocks",
    "final_layer",
)


@dataclass(frozen=True, kw_only=True)
class Components:
    """Loaded parts, ready for inference. description: where the weights come from, for the run header."""

    config: PolicyConfig
    transformer: ActionTransformer
    vae: VideoEncoder
    text_encoder: CaptionEncoder
    tokenizer: CaptionTokenizer
    description: str


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Architectures, known and checked before anything is allocated, and how to fill each module."""

    config: PolicyConfig
    vae: VideoEncoderConfig
    text: Any
    tokenizer: CaptionTokenizer
    fill_transformer: Callable[[ActionTransformer], None]
    fill_vae: Callable[[VideoEncoder], None]
    fill_text_encoder: Callable[[CaptionEncoder], None]
    description: str


@dataclass(frozen=True, kw_only=True)
class _Modules:
    transformer: ActionTransformer
    vae: VideoEncoder
    text_encoder: CaptionEncoder


def load_components(
    *,
    weights: WeightsConfig,
    variant: str,
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    padding_positions: PaddingPositions = "running",
    hub: Hub | None = None,
    check: Callable[[PolicyConfig], None] = lambda config: None,
    progress: Progress = NULL_PROGRESS,
) -> Components:
    """Load or draw all weights onto `device`.

    variant: one of `package.VARIANTS`. size: widths of synthetic weights; packages are `full`.
    dtype: of activations and of weights that are not FP8. padding_positions: see `CaptionEncoder`.
    check: looks at the policy's configuration before anything is allocated, and raises.
    Raises: ConfigError for settings that contradict each other, CheckpointError for files that are
        missing, damaged or do not fit, DeviceMemoryError before allocating what does not fit.
    """
    weights.check(size=size)
    if weights.kind == "synthetic":
        source = _synthetic(weights.synthetic_seed, variant, size)
    else:
        source = _package(weights, variant, hub or Hub())
    check(source.config)
    with torch.device("meta"):
        sizes = {
            name: module_bytes(module) for name, module in _named(_build(source, dtype, padding_positions))
        }
    require_fits(sizes, device)
    with torch.device(device):
        modules = _build(source, dtype, padding_positions)
    _fill(source, modules, progress)
    for _, module in _named(modules):
        module.eval().requires_grad_(False)
    return Components(
        config=source.config,
        transformer=modules.transformer,
        vae=modules.vae,
        text_encoder=modules.text_encoder,
        tokenizer=source.tokenizer,
        description=source.description,
    )


def _build(source: _Source, dtype: torch.dtype, padding_positions: PaddingPositions) -> _Modules:
    """Allocate on the current default device."""
    config = source.config
    return _Modules(
        transformer=ActionTransformer(config.transformer, dtype=dtype, quantization=config.quantization),
        vae=VideoEncoder(source.vae, dtype=dtype),
        text_encoder=CaptionEncoder(
            source.text,
            output_layers=config.text_output_layers,
            dtype=dtype,
            padding_positions=padding_positions,
        ),
    )


def _fill(source: _Source, modules: _Modules, progress: Progress) -> None:
    progress.start("loading", 3)
    source.fill_transformer(modules.transformer)
    progress.advance("loading")
    source.fill_vae(modules.vae)
    progress.advance("loading")
    source.fill_text_encoder(modules.text_encoder)
    progress.advance("loading")
    progress.finish("loading")


def _named(modules: _Modules) -> tuple[tuple[str, nn.Module], ...]:
    return (
        ("transformer", modules.transformer),
        ("vae", modules.vae),
        ("text_encoder", modules.text_encoder),
    )


def _synthetic(seed: int, variant: str, size: Size) -> _Source:
    tokenizer = build_tiny_tokenizer()

    def fill(prefix: str) -> Callable[[ActionTransformer | VideoEncoder | CaptionEncoder], None]:
        return lambda module: fill_synthetic(module.checkpoint_slots(), seed=seed, prefix=prefix)

    return _Source(
        config=droid_config(size, variant),
        vae=video_encoder_config(size),
        text=qwen3_vl_4b_config() if size == "full" else tiny_text_config(vocabulary=tokenizer.vocabulary),
        tokenizer=tokenizer,
        fill_transformer=fill(_DIT_PREFIX),
        fill_vae=fill(""),
        fill_text_encoder=fill("text_encoder."),
        description=f"synthetic, seed {seed}, {size}, variant {variant}: the actions mean nothing",
    )


def _package(weights: WeightsConfig, variant: str, hub: Hub) -> _Source:
    folder, origin = _locate(weights, variant, hub)
    package = read_package(folder, verify_weights=weights.verify_checksums)
    config = package.config
    nearby = (folder, folder.parents[1]) if variant_subfolder(variant) else (folder,)
    dit = open_checkpoint(package.weights)
    with _named_by("video_vae_id", folder):
        vae_file = resolve(
            config.video_vae_id, default_file="video_vae.safetensors", relative_to=nearby, hub=hub
        )
    with _named_by("text_encoder_id", folder):
        text_folder = resolve(config.text_encoder_id, relative_to=nearby, hub=hub)
    vae = open_checkpoint(vae_file)
    vae_config = read_video_encoder_config(vae)
    text = open_checkpoint(text_folder)
    text_config = read_text_config(text_folder)
    tokenizer = CaptionTokenizer.from_folder(text_folder)
    _check_latents(vae.path, vae_config)
    _check_text(text_folder, config, text_config, tokenizer)
    _check_fp8_scales(dit)

    def fill_transformer(transformer: ActionTransformer) -> None:
        unused = _other_streams(dit.entries, config.transformer.streams)
        load_into(dit, transformer.checkpoint_slots(), prefix=_DIT_PREFIX, ignore=unused)

    def fill_vae(encoder: VideoEncoder) -> None:
        load_into(vae, encoder.checkpoint_slots(), ignore=("model.decoder.",))

    def fill_text_encoder(encoder: CaptionEncoder) -> None:
        prefix = text_key_prefix(text.entries)
        unused = unused_text_keys(text_config, config.text_output_layers, prefix)
        load_into(text, encoder.checkpoint_slots(), prefix=prefix, ignore=unused)

    checked = "checksums verified" if weights.verify_checksums else "weight checksum not verified"
    described = (f"{origin}, variant {variant}, {checked}", *config.notes)
    return _Source(
        config=config,
        vae=vae_config,
        text=text_config,
        tokenizer=tokenizer,
        fill_transformer=fill_transformer,
        fill_vae=fill_vae,
        fill_text_encoder=fill_text_encoder,
        description="; ".join(described),
    )


@contextmanager
def _named_by(key: str, folder: Path) -> Iterator[None]:
    """Say which key of the package's config asked for what could not be found."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key} in the config of {folder}: {error}") from error


def _locate(weights: WeightsConfig, variant: str, hub: Hub) -> tuple[Path, str]:
    """Folder of the variant on disk, and where it came from."""
    subfolder = variant_subfolder(variant)
    if weights.kind == "local":
        root = Path(expanduser(weights.path or ""))
        return root / subfolder, str(root)
    where = HubId(weights.repo or "", subfolder or None, weights.revision)
    return hub.folder(where, files=PACKAGE_FILES), str(where)


def _check_latents(path: Path, vae: VideoEncoderConfig) -> None:
    if vae.z_dim != LATENT_CHANNELS:
        raise CheckpointError(
            f"{path}: the video VAE has {vae.z_dim} latent channels, the policy takes {LATENT_CHANNELS}. "
            "Use the video VAE that the package names."
        )


def _check_text(folder: Path, config: PolicyConfig, text: Any, tokenizer: CaptionTokenizer) -> None:
    width = len(config.text_output_layers) * text.hidden_size
    if width != config.transformer.context_in_dim:
        raise CheckpointError(
            f"{folder}: {len(config.text_output_layers)} layers of {text.hidden_size} channels make a text "
            f"context of {width}, the policy takes {config.transformer.context_in_dim}. "
            "Use the text encoder that the package names."
        )
    if tokenizer.vocabulary > text.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary} tokens, the model {text.vocab_size}. "
            "Fetch the folder again."
        )


def _check_fp8_scales(dit: Checkpoint) -> None:
    """Row scales are fp32 (spec section 12); a rounded one would pass as a float that converts."""
    for name, entry in dit.entries.items():
        if name.endswith(".weight_scale") and entry.dtype != torch.float32:
            raise CheckpointError(f"{dit.path}: {name} is {entry.dtype}, FP8 row scales must be float32.")


def _other_streams(names: Iterable[str], streams: tuple[str, ...]) -> tuple[str, ...]:
    """Beginnings of the keys of content streams that the policy does not use (spec section 8.1)."""
    known = {*streams, "txt"}
    split = (name.split(".", 3) for name in names if name.count(".") >= 3)
    return tuple(
        {
            f"{dit}.{group}.{stream}."
            for dit, group, stream, _ in split
            if group in _PER_STREAM and stream not in known
        }
    )
