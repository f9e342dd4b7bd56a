"""The forwards that `forwards.py` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel, LTX2VideoTransformer3DModel
from torch import Tensor, nn

from accel.fusion.mounting import BlockForward
from pipelines import synthetic_weights
from pipelines.flux2 import transformer_pass as flux2_pass
from pipelines.flux2.config import flux2_config
from pipelines.flux2.fused_blocks import TRANSFORMER_FORWARDS as FLUX2_FORWARDS
from pipelines.flux2.position_ids import image_position_ids, text_position_ids
from pipelines.flux3_action.denoising import Conditioning, Denoising
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.weights import load_components
from pipelines.ltx2 import transformer_pass as ltx2_pass
from pipelines.ltx2.architectures import architecture
from pipelines.ltx2.block_modulation import accept_sums
from pipelines.ltx2.fused_blocks import TRANSFORMER_FORWARDS as LTX2_FORWARDS
from pipelines.ltx2.text_attention import accept_keys
from pipelines.ltx2.text_keys import text_keys
from pipelines.module_building import build_modules
from pipelines.pipeline import Placement
from pipelines.weights_config import WeightsConfig
from tasks.config import ROOT, compose

BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Work:
    """One forward in two forms: the library's, and ours with what steps share computed before.

    compile: makes the compiled form of `stock`; compile_scope says what it compiled.
    """

    transformer: nn.Module
    tokens: str
    stock: Callable[..., Any]
    inputs: Sequence[Any]
    ours: Callable[..., Any]
    our_inputs: Sequence[Any]
    compile: Callable[[], Callable[..., Any]]
    compile_scope: str
    forwards: Sequence[BlockForward] = ()


def flux3_action(device: torch.device) -> Work:
    """The joint blocks and heads of one guidance pass, DROID shapes."""
    components = load_components(
        weights=WeightsConfig(kind="synthetic"), variant="base", size="full", device=device, dtype=BF16
    )
    pipeline = Flux3ActionPipeline(
        components,
        policy=compose("accel=eager").accel,
        placement=Placement(device=device, dtype=BF16, size="full", size_reason="benchmark"),
        outputs_mean_nothing=True,
    )
    denoising = next(stage for stage in pipeline.stages if isinstance(stage, Denoising))
    raw = {**load_episode_frame(ROOT / "data" / "panda_lift", 0), "prompt": "lift the red cube"}
    request = pipeline.request(parse_observation(raw, pipeline.config), seed=0)
    outputs = pipeline.run(request).outputs
    conditioning = Conditioning(
        outputs["text_encoding.text"],
        outputs["text_encoding.null_text"],
        outputs["observation_encoding.video_cond"],
        outputs["observation_encoding.state_cond"],
    )
    table = denoising.steps(request)[0].table
    streams = denoising.streams(denoising.start(request).targets, conditioning)
    inputs = (conditioning.text, streams, table)
    count = sum(part.shape[1] for part in [conditioning.text.tokens, *streams])
    return Work(
        transformer=components.transformer,
        tokens=f"{count:,} joint",
        stock=denoising.joint_pass,
        inputs=inputs,
        ours=denoising.joint_pass,
        our_inputs=inputs,
        compile=lambda: torch.compile(denoising.joint_pass, dynamic=False),
        compile_scope="whole",
    )


def flux2_klein(device: torch.device, *, size: int) -> Work:
    transformer: Any = _built(
        lambda: Flux2Transformer2DModel(**flux2_config("4b", "full").transformer), device
    )
    grid, text = (size // 16, size // 16), 512
    draw = _drawing(device)
    tokens, prompt = draw(1, grid[0] * grid[1], 128), draw(1, text, 7680)
    timestep = torch.full([1], 0.7371, dtype=BF16, device=device)
    text_ids, image_ids = text_position_ids(text).to(device), image_position_ids(grid, ()).to(device)

    def stock(tokens: Tensor, prompt: Tensor, timestep: Tensor, text_ids: Tensor, image_ids: Tensor) -> Any:
        return transformer(
            hidden_states=tokens,
            encoder_hidden_states=prompt,
            timestep=timestep,
            guidance=None,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]

    def ours(tokens: Tensor, context: Tensor, rope: Any, modulations: Any) -> Tensor:
        return flux2_pass.predict(transformer, tokens, context, rope=rope, modulations=modulations)

    return Work(
        transformer=transformer,
        tokens=f"{tokens.shape[1]:,} image + {text} text",
        stock=stock,
        inputs=(tokens, prompt, timestep, text_ids, image_ids),
        ours=ours,
        our_inputs=(
            tokens,
            flux2_pass.embed_context(transformer, prompt),
            flux2_pass.rope(transformer, text_ids, image_ids),
            flux2_pass.modulations(transformer, timestep, None),
        ),
        compile=lambda: torch.compile(stock, dynamic=False),
        compile_scope="whole",
        forwards=FLUX2_FORWARDS,
    )


def ltx2(device: torch.device, *, frames: int, height: int, width: int, audio: int) -> Work:
    """Batch 1, LTX-2.0; frames, height and width in latents."""
    values = architecture("2.0", "full").transformer
    transformer: Any = _built(lambda: LTX2VideoTransformer3DModel(**values), device)
    accept_keys(transformer)
    accept_sums(transformer)
    draw = _drawing(device)
    video, sound = draw(1, frames * height * width, 128), draw(1, audio, 128)
    text, audio_text = draw(1, 1024, 3840), draw(1, 1024, 3840)
    mask = torch.ones(1, 1024, dtype=torch.int64, device=device)
    timestep = torch.full((1,), 737.1, device=device)
    coords = (
        transformer.rope.prepare_video_coords(1, frames, height, width, device, fps=24.0),
        transformer.audio_rope.prepare_audio_coords(1, audio, device),
    )

    def stock(video: Tensor, sound: Tensor, video_coords: Tensor, audio_coords: Tensor) -> Any:
        return transformer(
            hidden_states=video,
            audio_hidden_states=sound,
            encoder_hidden_states=text,
            audio_encoder_hidden_states=audio_text,
            timestep=timestep,
            audio_timestep=timestep,
            sigma=timestep,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            video_coords=video_coords,
            audio_coords=audio_coords,
            use_cross_timestep=True,
            return_dict=False,
        )

    def ours(video: Tensor, sound: Tensor, given: Any, rope: Any, time: Any, modulation: Any) -> Any:
        return ltx2_pass.transformer_pass(
            transformer, video, sound, text=given, rope=rope, video_time=time, modulation=modulation
        )

    def compiled() -> Callable[..., Any]:
        transformer.compile_repeated_blocks(dynamic=False)
        return stock

    return Work(
        transformer=transformer,
        tokens=f"{video.shape[1]:,} video + {audio} audio",
        stock=stock,
        inputs=(video, sound, *coords),
        ours=ours,
        our_inputs=(
            video,
            sound,
            text_keys(transformer, ltx2_pass.project_text(transformer, text, audio_text, mask)),
            ltx2_pass.rotary_tables(transformer, *coords),
            ltx2_pass.embed_video_timestep(transformer, timestep, dtype=BF16),
            ltx2_pass.embed_timestep(transformer, timestep, dtype=BF16),
        ),
        compile=compiled,
        compile_scope="per block",
        forwards=LTX2_FORWARDS,
    )


def _built(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    def fill(_: str, module: nn.Module) -> None:
        synthetic_weights.fill(module, seed=0)

    return build_modules({"transformer": make}, fill=fill, dtype=BF16, device=device)["transformer"]


def _drawing(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, BF16)


WORKS: dict[str, Callable[[torch.device], Work]] = {
    "FLUX 3 Action joint pass": flux3_action,
    "FLUX.2 klein 4B, 1024x1024": lambda device: flux2_klein(device, size=1024),
    "FLUX.2 klein 4B, 512x512": lambda device: flux2_klein(device, size=512),
    "LTX-2.0, 121 frames 768x512": lambda device: ltx2(device, frames=16, height=16, width=24, audio=126),
    "LTX-2.0, small": lambda device: ltx2(device, frames=4, height=8, width=12, audio=64),
}
