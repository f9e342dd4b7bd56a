"""The stages of FLUX 3 Action in order, but for the fourth, `denoising`.

Shapes: L text tokens (a multiple of 80), C conditioning video tokens, K actions, A action channels,
D transformer width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from accel.fusion.gate import fusion_epoch
from accel.region import region
from pipelines.flux3_action.action_space import actions_from_targets, state_token
from pipelines.flux3_action.canvas import compose_canvas
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.position_ids import pack_latents
from pipelines.flux3_action.request import ActionRequest
from pipelines.flux3_action.tables import VIDEO_COND, StaticTables
from pipelines.flux3_action.text_encoder import CaptionEncoder
from pipelines.flux3_action.tokenizer import MAX_TOKENS, CaptionTokenizer
from pipelines.flux3_action.transformer import TEXT, ActionTransformer
from pipelines.flux3_action.video_vae import VideoEncoder
from pipelines.host_threads import one_host_thread
from pipelines.transfer import upload
from stages.stage import Field, Stage, State
from stages.text_encoding import CaptionCache

TRUNCATED = f"prompt: longer than {MAX_TOKENS} tokens; the text encoder sees only its beginning."


@dataclass(frozen=True)
class TextTokens:
    """A caption after the text encoder and the text mode blocks.

    tokens: (1, L, D), model dtype. rope: fp32 (1, L, head_dim).
    """

    tokens: Tensor
    rope: Tensor


@dataclass(frozen=True)
class EncodedCaption:
    """truncated: the caption lost its end."""

    text: TextTokens
    truncated: bool


class FusionEpoch:
    """Tells when a fused kernel was switched off, which may have made what a stage keeps between requests."""

    def __init__(self) -> None:
        self._seen = fusion_epoch()

    def moved(self) -> bool:
        """Since the last call."""
        before, self._seen = self._seen, fusion_epoch()
        return before != self._seen


class TextEncoding(Stage):
    """Prompt and, with guidance, the empty caption -> joint-ready text tokens. Cached per caption."""

    name: ClassVar[str] = "text_encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (
        Field("text", "(1, L, D)", "tokens of the prompt"),
        Field("null_text", "(1, L, D)", "tokens of the empty caption, or None without guidance"),
        Field("notes", unit="texts for whoever sent the prompt"),
    )

    def __init__(
        self,
        *,
        tokenizer: CaptionTokenizer,
        encoder: CaptionEncoder,
        transformer: ActionTransformer,
        tables: StaticTables,
        device: torch.device,
        cache_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._transformer = transformer
        self._tables = tables
        self._device = device
        # Captions differ more often than their lengths.
        self._prepare = lru_cache(maxsize=8)(partial(encoder.prepare, device=device))
        self._rope = lru_cache(maxsize=8)(tables.text_rope)
        self.cache: CaptionCache[EncodedCaption] = CaptionCache(token_budget=cache_tokens)
        self._fusion_epoch = FusionEpoch()

    def modules(self) -> Mapping[str, nn.Module]:
        return {
            "text_encoder": self._encoder,
            "transformer": self._transformer,
            "tables": self._tables,
        }

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        if self._fusion_epoch.moved():
            self.cache.clear()
        prompt = self._caption(request.observation.prompt)
        state["text"] = prompt.text
        state["null_text"] = self._caption("").text if request.guided else None
        state["notes"] = (TRUNCATED,) if prompt.truncated else ()

    def forget(self) -> None:
        self.cache.clear()
        self._tables.refresh(self._transformer)

    def _caption(self, caption: str) -> EncodedCaption:
        cached = self.cache.get(caption)
        if cached is not None:
            return cached
        tokenized = self._tokenizer.encode(caption)
        length = tokenized.input_ids.shape[1]
        context = self.encode(
            upload(tokenized.input_ids, self._device),
            *self._prepare(tokenized.n_tokens, length),
        )
        rope = self._rope(length)
        text = TextTokens(tokens=self.project(context, rope), rope=rope)
        encoded = EncodedCaption(text, tokenized.truncated)
        self.cache.put(caption, encoded, tokens=length)
        return encoded

    @region
    def encode(self, input_ids: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Language model, layers in use: (1, L) ids -> (1, L, context_in_dim)."""
        context: Tensor = self._encoder(input_ids, mask, cos, sin)
        return context

    @region
    def project(self, context: Tensor, rope: Tensor) -> Tensor:
        """Input projection and text mode blocks: -> (1, L, D)."""
        return self._transformer.embed_text(context, self._tables.early(TEXT), rope)


class Vae(Stage):
    """Camera images -> canvas -> normalised latent of the observed frame."""

    name: ClassVar[str] = "vae"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (
        Field("canvas", "(3, Hc, Wc)", "fp32 on the CPU, [-1, 1]"),
        Field("latent_tokens", "(1, C, 96)", "normalised latents, row-major"),
    )

    def __init__(
        self, *, config: PolicyConfig, vae: VideoEncoder, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._vae = vae
        self._device = device
        self._dtype = dtype

    def modules(self) -> Mapping[str, nn.Module]:
        return {"vae": self._vae}

    def forget(self) -> None:
        self._vae.refresh()

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        with one_host_thread():
            canvas = compose_canvas(request.observation.images, self._config)
            pixels = upload(canvas, self._device, dtype=self._dtype)
        state["canvas"] = canvas
        state["latent_tokens"] = self.encode(pixels[None, :, None])

    @region
    def encode(self, pixels: Tensor) -> Tensor:
        """(1, 3, 1, Hc, Wc) in [-1, 1] -> (1, C, 96), cropped to the latent grid that is kept."""
        height, width = self._config.latent_hw
        latent = self._vae.encode(pixels)
        return pack_latents(latent[..., :height, :width])


class TransformerStage(Stage):
    """A stage that runs parts of the transformer. dtype: of the tokens that it feeds."""

    def __init__(
        self,
        *,
        config: PolicyConfig,
        transformer: ActionTransformer,
        tables: StaticTables,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._transformer = transformer
        self._tables = tables
        self._device = device
        self._dtype = dtype

    def modules(self) -> Mapping[str, nn.Module]:
        return {"transformer": self._transformer, "tables": self._tables}

    def forget(self) -> None:
        self._tables.refresh(self._transformer)


class ObservationEncoding(TransformerStage):
    """Latent and robot state -> the two conditioning streams, through their mode blocks."""

    name: ClassVar[str] = "observation_encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"), Field("latent_tokens"))
    writes: ClassVar[tuple[Field, ...]] = (
        Field("video_cond", "(1, C, D)", "hidden tokens of the observed frame"),
        Field("state_cond", "(1, 1, D)", "hidden token of the robot state"),
    )

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        token = state_token(request.observation.state, self._config)
        state["video_cond"], state["state_cond"] = self.condition(
            state["latent_tokens"], upload(token, self._device, dtype=self._dtype)
        )

    @region
    def condition(self, latent_tokens: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """(1, C, 96) and (1, 1, A) -> (1, C, D) and (1, 1, D)."""
        return (
            self._embed(VIDEO_COND, latent_tokens),
            self._embed(self._tables.state, token),
        )

    def _embed(self, stream: str, tokens: Tensor) -> Tensor:
        return self._transformer.embed_stream(
            stream, tokens, self._tables.early(stream), self._tables.rope(stream)
        )


class ActionDecoding(Stage):
    """Action sample -> actions in dataset units, on the CPU."""

    name: ClassVar[str] = "action_decoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"), Field("action_tokens"))
    writes: ClassVar[tuple[Field, ...]] = (
        Field("actions", "(horizon, A)", "fp32 on the CPU, dataset units"),
    )

    def __init__(self, *, config: PolicyConfig) -> None:
        self._config = config

    def run(self, state: State) -> None:
        request: ActionRequest = state["request"]
        targets = state["action_tokens"][0].cpu()
        actions = actions_from_targets(targets, request.observation.state, self._config)
        state["actions"] = actions[: request.horizon]
