"""The stages of FLUX.2 in order, but for the third, `denoising`.

Shapes: L text tokens, J channels of prompt embeddings, R tokens of reference images, N of the image
that is made, C channels of a token, B images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accel.fusion.mounting import Mount, mount
from accel.region import region
from pipelines.flux2.fused_resnets import VAE_FORWARDS
from pipelines.flux2.position_ids import Grid
from pipelines.flux2.prompt import PromptTokenizer
from pipelines.flux2.request import ImageRequest
from pipelines.flux2.text_encoder import MAX_TOKENS, PromptEncoder, causal_mask
from pipelines.flux2.vae_latents import latents_from_tokens, tokens_from_latents
from pipelines.host_threads import one_host_thread
from pipelines.transfer import upload
from stages.stage import Field, Stage, State
from stages.text_encoding import CaptionCache

TRUNCATED = f"prompt: longer than {MAX_TOKENS} tokens; the text encoder sees only its beginning."


@dataclass(frozen=True)
class EncodedPrompt:
    """embeds: (1, L, J), model dtype. truncated: the prompt lost its end."""

    embeds: Tensor
    truncated: bool


class TextEncoding(Stage):
    """Prompt and, with classifier-free guidance, the empty prompt -> embeddings. Cached per prompt."""

    name: ClassVar[str] = "text_encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (
        Field("prompt_embeds", "(1, L, J)", "model dtype"),
        Field("negative_prompt_embeds", "(1, L, J)", "of the empty prompt, or None without guidance"),
        Field("notes", unit="texts for whoever sent the prompt"),
    )

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer,
        encoder: PromptEncoder,
        classifier_free_guidance: bool,
        device: torch.device,
        cache_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._classifier_free_guidance = classifier_free_guidance
        self._device = device
        self._rotary = encoder.rotary(MAX_TOKENS)
        self.cache: CaptionCache[EncodedPrompt] = CaptionCache(token_budget=cache_tokens)

    def modules(self) -> Mapping[str, nn.Module]:
        return {"text_encoder": self._encoder}

    def run(self, state: State) -> None:
        request: ImageRequest = state["request"]
        prompt = self._encoded(request.prompt)
        guided = self._classifier_free_guidance and request.guidance > 1
        state["prompt_embeds"] = prompt.embeds
        state["negative_prompt_embeds"] = self._encoded("").embeds if guided else None
        state["notes"] = (TRUNCATED,) if prompt.truncated else ()

    def forget(self) -> None:
        self.cache.clear()

    def _encoded(self, prompt: str) -> EncodedPrompt:
        cached = self.cache.get(prompt)
        if cached is not None:
            return cached
        tokens = self._tokenizer.encode(prompt)
        with one_host_thread():
            mask = causal_mask(tokens.attention_mask)
            input_ids = upload(tokens.input_ids, self._device)
            mask = None if mask is None else upload(mask, self._device)
        embeds = self.encode(input_ids, mask, *self._rotary)
        encoded = EncodedPrompt(embeds, tokens.truncated)
        self.cache.put(prompt, encoded, tokens=MAX_TOKENS)
        return encoded

    @region
    def encode(self, input_ids: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """Language model, layers in use: (1, L) ids -> (1, L, J)."""
        embeds: Tensor = self._encoder(input_ids, mask, cos, sin)
        return embeds


class ImageEncoding(Stage):
    """Reference images -> tokens that the transformer sees beside the image it makes."""

    name: ClassVar[str] = "image_encoding"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"),)
    writes: ClassVar[tuple[Field, ...]] = (
        Field("reference_tokens", "(1, R, C)", "normalised latents, or None without images"),
        Field("reference_grids", unit="rows and columns of tokens of each image"),
    )

    def __init__(self, *, vae: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._vae = vae
        self._device = device
        self._dtype = dtype

    def modules(self) -> Mapping[str, nn.Module]:
        return {"vae": self._vae}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]:
        return mount(self._vae.encoder, VAE_FORWARDS, allowed=allowed)

    def run(self, state: State) -> None:
        request: ImageRequest = state["request"]
        references = request.references
        with one_host_thread():
            pixels = [upload(reference.pixels, self._device, dtype=self._dtype) for reference in references]
        tokens = [self.encode(each) for each in pixels]
        state["reference_tokens"] = torch.cat(tokens, dim=1) if tokens else None
        state["reference_grids"] = tuple(reference.grid for reference in references)

    @region
    def encode(self, pixels: Tensor) -> Tensor:
        """(1, 3, H, W) in [-1, 1] -> (1, H W / 256, C), the most likely latents."""
        return tokens_from_latents(self._vae, self._vae.encode(pixels).latent_dist.mode())


class Vae(Stage):
    """Tokens of the finished images -> pixels."""

    name: ClassVar[str] = "vae"
    reads: ClassVar[tuple[Field, ...]] = (Field("request"), Field("latents"))
    writes: ClassVar[tuple[Field, ...]] = (Field("images", "(B, 3, H, W)", "model dtype, [0, 1]"),)

    def __init__(self, *, vae: Any) -> None:
        self._vae = vae

    def modules(self) -> Mapping[str, nn.Module]:
        return {"vae": self._vae}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Mount]:
        return mount(self._vae.decoder, VAE_FORWARDS, allowed=allowed)

    def run(self, state: State) -> None:
        request: ImageRequest = state["request"]
        state["images"] = self.decode(state["latents"], grid=request.grid)

    @region
    def decode(self, tokens: Tensor, *, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, 3, H, W) in [0, 1]."""
        latents = latents_from_tokens(self._vae, tokens, grid)
        pixels: Tensor = self._vae.decode(latents, return_dict=False)[0]
        return (pixels * 0.5 + 0.5).clamp(0, 1)
