"""Mounted forwards with real kernels against the stock ones: real widths, few blocks, bf16, bit for bit.

Run with `python -m pytest tests/gpu/test_mounted_blocks_gpu.py -m gpu`.
"""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("diffusers")
from diffusers import (
    AutoencoderKLFlux2,
    AutoencoderKLLTX2Video,
    Flux2Transformer2DModel,
    LTX2VideoTransformer3DModel,
)
from gpu_graph_harness import clean_cuda

from accel.fusion.mounting import mount
from accel.fusion.scope import fusion_scope
from accel.site_names import SITE_NAMES
from pipelines.flux2 import fused_blocks as flux2_blocks
from pipelines.flux2 import fused_resnets as flux2_resnets
from pipelines.ltx2 import fused_blocks as ltx2_blocks
from pipelines.ltx2 import fused_resnets as ltx2_resnets
from pipelines.ltx2.block_modulation import accept_sums, block_arguments
from pipelines.ltx2.text_attention import accept_keys
from pipelines.ltx2.text_keys import text_keys
from pipelines.ltx2.transformer_pass import Text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALL = frozenset(SITE_NAMES)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_cuda():
    with clean_cuda():
        torch.manual_seed(0)
        yield


def built(make, **config):
    model = make(**config).to(BF16).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name and weight.dim() == 1:  # initial weights of 1 would hide a swapped one
            weight.uniform_(0.5, 1.5)
    return model


def assert_fused_run_equals_stock(call, model, forwards, *, sites):
    """Stock against mounted with kernels: at first sight, verified, and as a CUDA graph.

    sites: those that every one of their calls must fuse once they are verified.
    """
    expected = call()
    for each in mount(model, forwards, allowed=ALL):
        assert each.report.mounted, each.report
    outcomes = []
    with fusion_scope(ALL, outcomes.append):
        first = call()
        outcomes.clear()
        second = call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = call()
    for output in replayed:
        output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for run in (first, second, replayed):
        for actual, stock in zip(run, expected, strict=True):
            assert torch.equal(actual, stock)
    unfused = {
        str(outcome) + outcome.detail for outcome in outcomes if outcome.site in sites and not outcome.fused
    }
    assert not unfused
    assert sites <= {outcome.site for outcome in outcomes}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [24, 48], ids=["klein-4b", "dev"])
def test_flux2_transformer(heads, batch):
    model = built(
        Flux2Transformer2DModel,
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=heads,
        joint_attention_dim=7680,
        guidance_embeds=False,
    )
    text, image = 512, 1024
    arguments = {
        "hidden_states": torch.randn(batch, image, 128, dtype=BF16),
        "encoder_hidden_states": torch.randn(batch, text, 7680, dtype=BF16),
        "timestep": torch.full((batch,), 0.7, dtype=BF16),
        "img_ids": torch.randint(0, 64, (image, 4)),
        "txt_ids": torch.randint(0, 64, (text, 4)),
        "return_dict": False,
    }
    tables = [model.pos_embed(arguments[ids]) for ids in ("txt_ids", "img_ids")]
    rope = tuple(torch.cat(pair) for pair in zip(*tables, strict=True))

    def call():
        """Without the rotary tables, which the library makes on the host."""
        embedding = model.time_guidance_embed(arguments["timestep"] * 1000, None)
        hidden = model.x_embedder(arguments["hidden_states"])
        context = model.context_embedder(arguments["encoder_hidden_states"])
        modulations = (
            model.double_stream_modulation_img(embedding),
            model.double_stream_modulation_txt(embedding),
        )
        for block in model.transformer_blocks:
            context, hidden = block(hidden, context, *modulations, image_rotary_emb=rope)
        hidden = torch.cat([context, hidden], dim=1)
        single = model.single_stream_modulation(embedding)
        for block in model.single_transformer_blocks:
            hidden = block(hidden, None, single, image_rotary_emb=rope)
        return (hidden,)

    assert_fused_run_equals_stock(
        call,
        model,
        flux2_blocks.TRANSFORMER_FORWARDS,
        sites={
            "layer_norm_modulate",
            "residual_layer_norm_modulate",
            "joint_qk_norm_rope",
            "swiglu",
            "swiglu_concat",
            "gated_residual",
        },
    )


V23 = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "perturbed_attn": True,
}


def hoisted(model, arguments):
    """Arguments of every block, with what is computed for all of them before."""
    accept_keys(model)
    accept_sums(model)
    names = ("encoder_hidden_states", "audio_encoder_hidden_states", "encoder_attention_mask")
    text = text_keys(model, Text(*(arguments[name] for name in names)))
    shared = {name: value for name, value in arguments.items() if name.startswith("temb")}
    sums = block_arguments(model.transformer_blocks, shared)
    return [{**arguments, **text.of_block(index), **of_block} for index, of_block in enumerate(sums)]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("per_token", [False, True], ids=["one-timestep", "per-token"])
@pytest.mark.parametrize("flags", [{}, V23], ids=["2.0", "2.3"])
@pytest.mark.parametrize("hoists", [False, True], ids=["library-arguments", "hoisted"])
def test_ltx2_transformer_blocks(hoists, flags, per_token, batch):
    model = built(LTX2VideoTransformer3DModel, num_layers=2, rope_type="split", **flags)
    video, audio, text = 1536, 126, 1024
    width, audio_width = 4096, 2048

    def randn(*shape):
        return torch.randn(shape, dtype=BF16)

    def rope(heads, tokens, dim):
        angles = torch.rand(batch, heads, tokens, dim // 2) * 100
        return angles.cos(), angles.sin()

    rows = video if per_token else 1
    parameters = 9 if flags else 6
    mask = torch.zeros(batch, 1, text, dtype=BF16)
    mask[..., 700:] = -10000
    arguments = {
        "encoder_hidden_states": randn(batch, text, width),
        "audio_encoder_hidden_states": randn(batch, text, audio_width),
        "temb": randn(batch, rows, parameters * width),
        "temb_audio": randn(batch, 1, parameters * audio_width),
        "temb_ca_scale_shift": randn(batch, 1, 4 * width),
        "temb_ca_audio_scale_shift": randn(batch, 1, 4 * audio_width),
        "temb_ca_gate": randn(batch, 1, width),
        "temb_ca_audio_gate": randn(batch, 1, audio_width),
        "temb_prompt": randn(batch, 1, 2 * width) if flags else None,
        "temb_prompt_audio": randn(batch, 1, 2 * audio_width) if flags else None,
        "video_rotary_emb": rope(32, video, 128),
        "audio_rotary_emb": rope(32, audio, 64),
        "ca_video_rotary_emb": rope(32, video, 64),
        "ca_audio_rotary_emb": rope(32, audio, 64),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "all_perturbed": False,
    }
    tokens = randn(batch, video, width), randn(batch, audio, audio_width)
    given = [arguments] * len(model.transformer_blocks)

    def call():
        """Both modalities, then each for itself."""
        hidden = tokens
        for block, own in zip(model.transformer_blocks, given, strict=True):
            hidden = block(*hidden, **own)
        for block, own in zip(model.transformer_blocks, given, strict=True):
            hidden = block(*hidden, **own, use_a2v_cross_attention=False, use_v2a_cross_attention=False)
        return hidden

    if hoists:
        expected = call()
        given = hoisted(model, arguments)
        for actual, stock in zip(call(), expected, strict=True):
            assert torch.equal(actual, stock)
    assert_fused_run_equals_stock(
        call,
        model,
        ltx2_blocks.TRANSFORMER_FORWARDS,
        sites={"rms_norm_modulate", "residual_rms_norm_modulate", "qk_norm_split_rope", "gated_residual"},
    )


def test_flux2_vae_decoder():
    model = built(AutoencoderKLFlux2)
    latents = torch.randn(1, model.config.latent_channels, 64, 64, dtype=BF16)
    assert_fused_run_equals_stock(
        lambda: (model.decode(latents).sample,),
        model.decoder,
        flux2_resnets.VAE_FORWARDS,
        sites={"group_norm_silu"},
    )


def test_ltx2_video_vae_decoder():
    model = built(AutoencoderKLLTX2Video)
    latents = torch.randn(1, model.config.latent_channels, 3, 8, 12, dtype=BF16)
    assert_fused_run_equals_stock(
        lambda: (model.decode(latents, return_dict=False)[0],),
        model.decoder,
        ltx2_resnets.VAE_FORWARDS,
        sites={"channel_norm_silu"},
    )
