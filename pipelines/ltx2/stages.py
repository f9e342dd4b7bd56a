"""The stages of LTX-2 in order, but for the fourth, `denoising`, and what comes after it.

Shapes: B videos, R rows (2 B with a negative prompt, which comes first), L text tokens, D width and N
layers of the text encoder, C x F x H x W video latents, T x M audio latents with Ca channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel.fusion.mounting import Mount, mount
from accel.region import region
from pipelines.host_threads import one_host_thread
from pipelines.ltx2.fused_resnets import VAE_FORWARDS
from pipelines.ltx2.images import first_frame_pixels
from pipelines.ltx2.latent_shapes import (
    Latents,
    LatentShape,
    channel_statistics,
    first_frame_mask,
    latent_shape,
    pack_audio,
    pack_video,
)
from pipelines.ltx2.prompt import PromptTokenizer
from pipelines.ltx2.request import VideoRequest
from pipelines.ltx2.text_encoder import PromptTokens, attention_masks, hidden_states, rotary_tables
from pipelines.ltx2.transformer_pass import Text, Transformer, project_text
from pipelines.prompt_tokens import TokenizedPrompt
from pipelines.transfer import upload
from stages.stage import Field, Stage, State
from stages.text_encoding import CaptionCache


@dataclass(frozen=True)
class PromptStates:
    """A prompt after the text encoder.

    states: (1, L, D (N + 1)), model dtype. mask: int64 (1, L), 1 at real tokens. truncated: it lost its end.
    """

    states: Tensor
    mask: Tensor
    truncated: bool


@dataclass(frozen=True)
class PromptText:
    """What the transformer attends to. batch: R rows. positive: the B rows of the prompt alone."""

    batch: Text
    positive: Text


class TextEncoding(Stage):
    """Prompt and, with guidance, negative prompt -> hidden states of the language model. Cached by text."""

    name: ClassVar[str] = "text_encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (
        Field("prompt_states", "(1, L, D (N + 1))", "hidden states of the prompt"),
        Field("negative_states", "(1, L, D (N + 1))", "of the negative prompt, or None without guidance"),
        Field("notes", unit="texts for whoever sent the prompt"),
    )

    def __init__(
        self, *, tokenizer: PromptTokenizer, encoder: nn.Module, device: torch.device, cache_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._device = device
        self._rope = rotary_tables(encoder, tokenizer.length)
        self.cache: CaptionCache[PromptStates] = CaptionCache(token_budget=cache_tokens)

    def modules(self) -> Mapping[str, nn.Module]:
        return {"text_encoder": self._encoder}

    def forget(self) -> None:
        self.cache.clear()

    def run(self, state: State) -> None:
        request: VideoRequest = state["request"]
        prompt = self._encoded(request.prompt)
        negative = self._encoded(request.negative_prompt) if request.guidance.text else None
        state["prompt_states"], state["negative_states"] = prompt, negative
        state["notes"] = tuple(
            f"{name}: longer than {self._tokenizer.length} tokens; the text encoder sees only its beginning."
            for name, encoded in (("prompt", prompt), ("model.negative_prompt", negative))
            if encoded is not None and encoded.truncated
        )

    def _encoded(self, prompt: str) -> PromptStates:
        text = self._tokenizer.text(prompt)
        cached = self.cache.get(text)
        if cached is not None:
            return cached
        tokenized = self._tokenizer.encode(text)
        with one_host_thread():
            tokens = self._on_device(tokenized)
            mask = upload(tokenized.attention_mask, self._device)
        encoded = PromptStates(self.encode(tokens), mask, tokenized.truncated)
        self.cache.put(text, encoded, tokens=self._tokenizer.length)
        return encoded

    def _on_device(self, tokenized: TokenizedPrompt) -> PromptTokens:
        device = self._device
        masks = attention_masks(self._encoder, tokenized.attention_mask)
        masks = {kind: mask if mask is None else upload(mask, device) for kind, mask in masks.items()}
        return PromptTokens(upload(tokenized.input_ids, device), masks, self._rope)

    @region
    def encode(self, tokens: PromptTokens) -> Tensor:
        """-> (1, L, D (N + 1))."""
        return hidden_states(self._encoder, tokens)


class Connectors(Stage):
    """Hidden states -> text of both modalities, projected as the blocks take it."""

    name: ClassVar[str] = "connectors"
    reads: ClassVar[tuple[Field, ...]] = (
        Field("request"),
        Field("prompt_states"),
        Field("negative_states"),
    )
    writes: ClassVar[tuple[Field, ...]] = (
        Field("text", "(R, L, width)", "text of both modalities, negative rows first"),
        Field("refinement_text", "(B, L, width)", "of the prompt alone; None without a refinement"),
    )

    def __init__(self, *, connectors: nn.Module, transformer: Transformer) -> None:
        self._connectors = connectors
        self._transformer = transformer

    def modules(self) -> Mapping[str, nn.Module]:
        return {"connectors": self._connectors, "transformer": self._transformer}

    def run(self, state: State) -> None:
        request: VideoRequest = state["request"]
        prompt, negative = state["prompt_states"], state["negative_states"]
        text = self._connected(negative, prompt, videos=request.videos)
        state["text"] = text
        if request.refinement is None:
            state["refinement_text"] = None
        elif negative is None:
            state["refinement_text"] = text
        else:  # anew, since rows of a larger batch may round differently
            state["refinement_text"] = self._connected(prompt, videos=request.videos)

    def _connected(self, *prompts: PromptStates | None, videos: int) -> PromptText:
        given = [prompt for prompt in prompts if prompt is not None]
        return self.connect([p.states for p in given], [p.mask for p in given], videos=videos)

    @region
    def connect(self, states: list[Tensor], masks: list[Tensor], *, videos: int) -> PromptText:
        """states, masks: of the negative prompt, if there is one, then of the prompt; repeated per video."""
        text = self._connectors(
            torch.cat([state for state in states for _ in range(videos)]),
            torch.cat([mask for mask in masks for _ in range(videos)]),
            padding_side="left",
        )
        batch = project_text(self._transformer, *text)
        if len(states) == 1:
            return PromptText(batch, batch)
        return PromptText(batch, project_text(self._transformer, *(part[videos:] for part in text)))


class LatentPreparation(Stage):
    """Seed and first frame -> noise of both modalities, on one CPU generator, video first."""

    name: ClassVar[str] = "latent_preparation"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"), Field("generator"))
    writes: ClassVar[tuple[Field, ...]] = (
        Field("noise", "(B, F H W, C) and (B, T, Ca M)", "fp32 `Latents`; the first frame's are given ones"),
        Field("given", "(B, F H W)", "fp32, 1 at tokens of a given first frame, else 0; None without one"),
    )

    def __init__(self, *, vae: Any, audio_vae: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._vae = vae
        self._audio_vae = audio_vae
        self._device = device
        self._dtype = dtype

    def modules(self) -> Mapping[str, nn.Module]:
        return {"vae": self._vae}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]:
        return mount(self._vae.encoder, VAE_FORWARDS, allowed=allowed)

    def run(self, state: State) -> None:
        request: VideoRequest = state["request"]
        height, width = request.first_size
        shape = latent_shape(
            self._vae, self._audio_vae, frames=request.frames, height=height, width=width, fps=request.fps
        )
        video, audio = self.noise(shape, videos=request.videos, generator=state["generator"])
        given = None
        if request.image is not None:
            mask = first_frame_mask(shape, videos=request.videos, device=self._device)
            latent = self.encode_image(self._pixels(request)).repeat(1, 1, shape.frames, 1, 1)
            video = latent * mask + video * (1 - mask)
            given = pack_video(mask).squeeze(-1)
        state["noise"] = Latents(pack_video(video), pack_audio(audio), shape)
        state["given"] = given

    def noise(self, shape: LatentShape, *, videos: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """fp32 (B, C, F, H, W) and (B, Ca, T, M)."""
        config = self._audio_vae.config

        def draw(*dims: int) -> Tensor:
            noise = torch.randn(videos, *dims, generator=generator, dtype=torch.float32, device="cpu")
            return upload(noise, self._device)

        video = draw(self._vae.config.latent_channels, shape.frames, shape.height, shape.width)
        mel_bins = config.mel_bins // self._audio_vae.mel_compression_ratio
        return video, draw(config.latent_channels, shape.audio_frames, mel_bins)

    def _pixels(self, request: VideoRequest) -> Tensor:
        assert request.image is not None
        height, width = request.first_size
        pixels = first_frame_pixels(
            request.image,
            height=height,
            width=width,
            crf=request.image_crf,
            vae_ratio=self._vae.spatial_compression_ratio,
        )
        return upload(pixels, self._device, dtype=self._dtype)

    @region
    def encode_image(self, pixels: Tensor) -> Tensor:
        """(1, 3, height, width) in [-1, 1], of the first pass -> normalised latents, fp32 (1, C, 1, H, W)."""
        latents: Tensor = self._vae.encode(pixels.unsqueeze(2)).latent_dist.mode().float()
        mean, std = channel_statistics(self._vae, torch.float32)
        return (latents - mean) / std
