"""Our LTX-2 pipeline and diffusers' own around the same component objects, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTX2ImageToVideoPipeline,
    LTX2LatentUpsamplePipeline,
    LTX2Pipeline,
)
from diffusers.pipelines.ltx2.utils import STAGE_2_DISTILLED_SIGMA_VALUES
from PIL import Image
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from accel.policy import AccelPolicy
from pipelines.ltx2 import components as ltx2_components
from pipelines.ltx2.components import Components
from pipelines.ltx2.guidance import UNGUIDED, Guidance
from pipelines.ltx2.latent_shapes import Latents, unpack_audio, unpack_video
from pipelines.ltx2.pipeline import Ltx2Pipeline
from pipelines.ltx2.request import VideoRequest, VideoResult
from pipelines.pipeline import Placement
from pipelines.weights_config import WeightsConfig

CPU = torch.device("cpu")
EAGER = AccelPolicy(
    name="eager", enable_cuda_graph=False, graph_mode="full", max_entries=4, max_segments=64,
    on_full="eager", strict=False, fused={}, stages={},
)  # fmt: skip

NO_GUIDANCE = {
    "guidance": 1.0,
    "guidance_audio": 1.0,
    "stg": 0.0,
    "guidance_modality": 1.0,
    "guidance_rescale": 0.0,
}
"""Settings."""


def picture() -> Image.Image:
    row = torch.arange(70)
    pixels = torch.stack([row[:, None] * 3 + row[:50] * s for s in (1, 2, 0)], dim=-1) % 256
    return Image.fromarray(pixels.to(torch.uint8).numpy())


@lru_cache(maxsize=8)
def tiny_components(
    variant: str = "2.0",
    dtype: torch.dtype = torch.float32,
    perturbed_attn: bool | None = None,
    device: torch.device = CPU,
    two_stage: bool = False,
) -> Components:
    """Tiny networks whose statistics of latents are not the neutral ones; shared, so not to be changed.

    perturbed_attn: whether spatio-temporal guidance has an effect; `None` leaves it to the variant.
    """
    weights = WeightsConfig(kind="synthetic", synthetic_seed=1)
    components = ltx2_components.load(
        weights=weights, variant=variant, size="tiny", dtype=dtype, device=device, two_stage=two_stage
    )
    generator = torch.Generator().manual_seed(2)
    for vae in (components.vae, components.audio_vae):
        vae.latents_mean.copy_(torch.randn(vae.latents_mean.shape, generator=generator) * 0.3)
        vae.latents_std.copy_(torch.rand(vae.latents_std.shape, generator=generator) + 0.5)
    if variant == "2.3":
        for basis in (
            components.vocoder.mel_stft.mel_basis,
            components.vocoder.mel_stft.stft_fn.forward_basis,
        ):
            basis.copy_(torch.randn(basis.shape, generator=generator))
    if perturbed_attn is not None:
        components = _with_perturbed_attention(components, perturbed_attn)
    return components


def ours(
    components: Components, *, policy: AccelPolicy = EAGER, attention_breaks: bool = False
) -> Ltx2Pipeline:
    transformer = components.transformer
    placement = Placement(
        device=transformer.device, dtype=transformer.dtype, size="tiny", size_reason="a test"
    )
    return Ltx2Pipeline(
        components,
        policy=policy,
        placement=placement,
        outputs_mean_nothing=True,
        attention_breaks=attention_breaks,
    )


@dataclass(frozen=True)
class Stock:
    """What diffusers' pipeline returns for a request: latents are denormalised, before the cast."""

    video_latents: Tensor
    audio_latents: Tensor
    frames: Tensor
    waveform: Tensor


def stock(components: Components, request: VideoRequest) -> Stock:
    """What diffusers' pipeline makes of the request, with a transformer that only the library has touched."""
    untouched = replace(components, transformer=rebuilt(components.transformer))
    return stock_around(untouched, request)


def stock_around(components: Components, request: VideoRequest) -> Stock:
    """What diffusers' pipeline around these very objects makes of the request."""
    return outputs_of(stock_pipeline(components, with_image=request.image is not None), components, request)


def outputs_of(pipeline: Any, components: Components, request: VideoRequest) -> Stock:
    """Call diffusers' pipeline twice, for latents and for what they decode to.

    A request in two passes goes through diffusers' pipelines as their documented recipe chains them, but
    for the LoRA. components: what the recipe needs beside the pipeline.
    """

    def call(output_type: str) -> Any:
        generator = torch.Generator("cpu").manual_seed(request.seed)
        common = {
            **_common(request),
            "generator": generator,
            "max_sequence_length": components.tokenizer.length,
        }
        height, width = request.first_size
        first = {"height": height, "width": width, **_sampling(request.sigmas, request.guidance)}
        plan = request.refinement
        if plan is None:
            return pipeline(**common, **first, output_type=output_type)
        video, audio = pipeline(**common, **first, output_type="latent")
        upsample = LTX2LatentUpsamplePipeline(
            vae=components.vae, latent_upsampler=components.latent_upsampler
        )
        (upsampled,) = upsample(
            latents=video,
            adain_factor=plan.adain,
            tone_map_compression_ratio=plan.tone_mapping,
            output_type="latent",
            return_dict=False,
        )
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
            components.scheduler.config, use_dynamic_shifting=False, shift_terminal=None
        )
        refined = pipeline(
            **common,
            **_sampling(STAGE_2_DISTILLED_SIGMA_VALUES, UNGUIDED),
            height=request.height,
            width=request.width,
            latents=upsampled,
            audio_latents=audio,
            noise_scale=STAGE_2_DISTILLED_SIGMA_VALUES[0],
            output_type=output_type,
        )
        pipeline.scheduler = components.scheduler
        return refined

    return Stock(*call("latent"), *call("pt"))


def _common(request: VideoRequest) -> dict[str, Any]:
    """What the calls of both passes are given."""
    image = {"image": request.image, "image_crf": request.image_crf} if request.image is not None else {}
    return {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "num_frames": request.frames,
        "frame_rate": request.fps,
        "num_videos_per_prompt": request.videos,
        "return_dict": False,
        **image,
    }


def _sampling(sigmas: Sequence[float], guidance: Guidance) -> dict[str, Any]:
    return {
        "num_inference_steps": len(sigmas),
        "sigmas": list(sigmas),
        "guidance_scale": guidance.video.text,
        "stg_scale": guidance.video.stg,
        "modality_scale": guidance.video.modality,
        "guidance_rescale": guidance.video.rescale,
        "audio_guidance_scale": guidance.audio.text,
        "audio_stg_scale": guidance.audio.stg,
        "audio_modality_scale": guidance.audio.modality,
        "audio_guidance_rescale": guidance.audio.rescale,
        "spatio_temporal_guidance_blocks": list(guidance.stg_blocks) or None,
    }


def same_outputs(result: VideoResult, expected: Stock, components: Components) -> dict[str, bool]:
    """Whether each of the four outputs has exactly the expected values, by name."""
    outputs = result.outputs
    latents: Latents = outputs.get("refinement.refined_latents", outputs["denoising.latents"])
    vae, audio_vae = components.vae, components.audio_vae
    video = LTX2Pipeline._denormalize_latents(
        unpack_video(latents.video, latents.shape),
        vae.latents_mean,
        vae.latents_std,
        vae.config.scaling_factor,
    )
    audio = LTX2Pipeline._denormalize_audio_latents(
        latents.audio, audio_vae.latents_mean, audio_vae.latents_std
    )
    mel_bins = expected.audio_latents.shape[-1]
    return {
        "video_latents": torch.equal(video, expected.video_latents),
        "audio_latents": torch.equal(unpack_audio(audio, mel_bins=mel_bins), expected.audio_latents),
        "frames": torch.equal(result.frames, expected.frames.cpu()),
        "waveform": torch.equal(result.waveform, expected.waveform.cpu()),
    }


ALL_SAME = dict.fromkeys(("video_latents", "audio_latents", "frames", "waveform"), True)


def stock_pipeline(components: Components, *, with_image: bool) -> Any:
    text = components.text_encoder
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    encoder = Gemma3ForConditionalGeneration(config).to(text.device, text.dtype).eval()
    encoder.model.language_model = text
    made = LTX2ImageToVideoPipeline if with_image else LTX2Pipeline
    pipeline = made(
        scheduler=components.scheduler,
        vae=components.vae,
        audio_vae=components.audio_vae,
        text_encoder=encoder,
        tokenizer=components.tokenizer._tokenizer,
        connectors=components.connectors,
        transformer=components.transformer,
        vocoder=components.vocoder,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def rebuilt(transformer: Any, **changes: Any) -> Any:
    """The library's own transformer, as it makes it, with the same weights. changes: of its config."""
    config = {name: value for name, value in transformer.config.items() if not name.startswith("_")}
    new = type(transformer)(**{**config, **changes}).to(transformer.device, transformer.dtype)
    new.load_state_dict(transformer.state_dict())
    return new.eval().requires_grad_(False)


def _with_perturbed_attention(components: Components, perturbed: bool) -> Components:
    """The same weights in a transformer built with `perturbed_attn`."""
    transformer = rebuilt(components.transformer, perturbed_attn=perturbed)
    assert transformer.config.perturbed_attn == perturbed
    return replace(components, transformer=transformer)
