"""LTX-2's mounted forwards: the bits of the stock ones, or the stock ones."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel
from ltx2_harness import EAGER, ours, picture, tiny_components

from accel.fusion.mounting import Draw, fingerprint, mount, qualified_name
from accel.fusion.scope import fusion_scope
from accel.record import Reason
from accel.site_names import SITE_NAMES
from pipelines.ltx2.block_modulation import TableSum, accept_sums, block_arguments
from pipelines.ltx2.fused_blocks import TRANSFORMER_FORWARDS
from pipelines.ltx2.fused_resnets import VAE_FORWARDS
from pipelines.ltx2.known_structure import KNOWN
from pipelines.ltx2.request import video_request
from pipelines.ltx2.settings import Ltx2Settings
from pipelines.ltx2.text_attention import accept_keys
from pipelines.ltx2.text_keys import TextKeys, text_keys
from pipelines.ltx2.transformer_pass import Text

ALL = frozenset(SITE_NAMES)
V23 = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
}
MODELS = {
    "2.0": {},
    "2.3": V23,
    "static-prompt": {**V23, "use_prompt_adaln_single": False},
    "odd": {"num_attention_heads": 3, "attention_head_dim": 10, "audio_num_attention_heads": 3},
}
FRAMES, HEIGHT, WIDTH, AUDIO, TEXT = 2, 2, 3, 5, 4


def transformer(**changes):
    torch.manual_seed(0)
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 16,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 4,
        "audio_cross_attention_dim": 8,
        "num_layers": 2,
        "caption_channels": 32,
        "rope_type": "split",
        "rope_double_precision": False,
        "vae_scale_factors": (2, 2, 2),
    }
    config |= changes
    config["cross_attention_dim"] = config["num_attention_heads"] * config["attention_head_dim"]
    config["audio_cross_attention_dim"] = (
        config["audio_num_attention_heads"] * config["audio_attention_head_dim"]
    )
    model = LTX2VideoTransformer3DModel(**config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm_q" in name or "norm_k" in name:  # initial weights of 1 would hide a swapped one
            weight.uniform_(0.5, 1.5)
    return model


def inputs(model, batch, *, dtype=torch.float32, per_token=False):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    tokens = FRAMES * HEIGHT * WIDTH
    own = model.config.use_prompt_embeddings
    width, audio_width = (32, 32) if own else (model.proj_in.out_features, model.audio_proj_in.out_features)
    mask = torch.ones(batch, TEXT)
    mask[-1, -2:] = 0
    timestep = torch.rand(batch, generator=generator) * 1000
    return {
        "hidden_states": draw(batch, tokens, 4),
        "audio_hidden_states": draw(batch, AUDIO, 4),
        "encoder_hidden_states": draw(batch, TEXT, width),
        "audio_encoder_hidden_states": draw(batch, TEXT, audio_width),
        "timestep": timestep[:, None] * (torch.arange(tokens) > 5) if per_token else timestep,
        "audio_timestep": timestep,
        "sigma": timestep,
        "encoder_attention_mask": mask.to(dtype),
        "audio_encoder_attention_mask": mask.to(dtype),
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "audio_num_frames": AUDIO,
        "return_dict": False,
    }


@torch.inference_mode()
def run(model, arguments):
    return model(**arguments)


def mounted(model):
    (each,) = mount(model, TRANSFORMER_FORWARDS, allowed=ALL)
    assert each.report.mounted, each.report
    return each


def assert_equal(actual, expected):
    for mine, stock in zip(actual, expected, strict=True):
        assert torch.equal(mine, stock)


CALLS: dict[str, dict] = {
    "plain": {},
    "isolated": {"isolate_modalities": True},
    "perturbed": {"spatio_temporal_guidance_blocks": [1]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("per_token", [False, True], ids=["one-timestep", "per-token"])
@pytest.mark.parametrize("version", MODELS)
def test_mounted_transformer_has_the_bits_of_stock(version, per_token, batch, dtype):
    model = transformer(**MODELS[version]).to(dtype)
    arguments = inputs(model, batch, dtype=dtype, per_token=per_token)
    causal = torch.ones(batch, FRAMES * HEIGHT * WIDTH, FRAMES * HEIGHT * WIDTH).tril()
    calls = {**CALLS, "masked": {"video_self_attention_mask": causal}}
    expected = {name: run(model, {**arguments, **extra}) for name, extra in calls.items()}
    mounted(model)
    for name, extra in calls.items():
        assert_equal(run(model, {**arguments, **extra}), expected[name])
        outcomes = []
        with fusion_scope(ALL, outcomes.append):
            assert_equal(run(model, {**arguments, **extra}), expected[name])
        assert {outcome.reason for outcome in outcomes} == {Reason.NO_CUDA}
    assert not torch.equal(expected["plain"][0], expected["isolated"][0])
    if model.config.perturbed_attn:
        assert not torch.equal(expected["plain"][0], expected["perturbed"][0])


@pytest.mark.parametrize("a2v", [True, False])
@pytest.mark.parametrize("v2a", [True, False])
def test_either_direction_between_the_modalities_can_be_off(a2v, v2a):
    block = transformer(**V23).transformer_blocks[0]
    (example, _) = TRANSFORMER_FORWARDS[0].examples(block, Draw(block))
    arguments = {**example, "use_a2v_cross_attention": a2v, "use_v2a_cross_attention": v2a}
    expected = block(**arguments)
    mounted(torch.nn.ModuleList([block]))
    assert_equal(block(**arguments), expected)


@pytest.mark.parametrize("version", MODELS)
@torch.inference_mode()
def test_mounted_blocks_take_what_is_hoisted(version):
    model = transformer(**MODELS[version])
    block = model.transformer_blocks[1]
    (example, _) = TRANSFORMER_FORWARDS[0].examples(block, Draw(block))
    names = ("encoder_hidden_states", "audio_encoder_hidden_states", "encoder_attention_mask")
    text = Text(*(example.pop(name) for name in names))
    expected = block(**example, **text.of_block(1))
    if not block.cross_attn_adaln:
        example |= {"temb_prompt": None, "temb_prompt_audio": None}
    accept_keys(model)
    accept_sums(model)
    keys = text_keys(model, text)
    assert isinstance(keys, Text if block.cross_attn_adaln else TextKeys)
    shared = {name: value for name, value in example.items() if name.startswith("temb")}
    sums = block_arguments(model.transformer_blocks, shared)[1]
    assert all(isinstance(value, TableSum) for name, value in sums.items() if shared[name] is not None)
    mounted(model)
    outcomes = []
    with fusion_scope(ALL, outcomes.append):
        assert_equal(block(**{**example, **keys.of_block(1), **sums}), expected)
    assert {outcome.reason for outcome in outcomes} == {Reason.NO_CUDA}


def test_residuals_are_fused_with_the_norms_that_follow():
    model = transformer()
    arguments = inputs(model, 1)
    mounted(model)
    outcomes = []
    with fusion_scope(ALL, outcomes.append):
        run(model, arguments)
    calls = [outcome.site for outcome in outcomes]
    blocks = 2
    # Of each modality: one norm that follows no residual, three residuals before a norm, one at the end.
    assert calls.count("residual_rms_norm_modulate") == 2 * 3 * blocks
    assert calls.count("qk_norm_split_rope") == 4 * blocks


@pytest.mark.parametrize("site", sorted(TRANSFORMER_FORWARDS[0].sites))
def test_result_is_right_whatever_the_kernel_does(kernel_behind, site):
    expected_outcome = kernel_behind(site)
    model = transformer(**V23)
    arguments = inputs(model, 2)
    expected = run(model, arguments)
    mounted(model)
    outcomes = []
    # Were all sites allowed, those that serve as parts of larger ones would not be called.
    with fusion_scope(frozenset({site}), outcomes.append):
        assert_equal(run(model, arguments), expected)
    judged = {(outcome.fused, outcome.reason) for outcome in outcomes if outcome.site == site}
    assert judged == {expected_outcome}


def test_interleaved_rotary_embedding_keeps_the_stock_forward():
    (each,) = mount(transformer(rope_type="interleaved"), TRANSFORMER_FORWARDS, allowed=ALL)
    assert each.report.reason is Reason.UNSUPPORTED_MODULE
    assert "interleaved" in each.report.detail


def vae(**changes):
    torch.manual_seed(0)
    config = {
        "latent_channels": 4,
        "block_out_channels": (8,),
        "decoder_block_out_channels": (8,),
        "layers_per_block": (1,),
        "decoder_layers_per_block": (1, 1),
        "spatio_temporal_scaling": (True,),
        "decoder_spatio_temporal_scaling": (True,),
        "decoder_inject_noise": (False, False),
        "downsample_type": ("spatial",),
        "upsample_residual": (False,),
        "upsample_factor": (1,),
        "timestep_conditioning": False,
        "patch_size": 1,
        "patch_size_t": 1,
        "encoder_causal": True,
        "decoder_causal": False,
    }
    return AutoencoderKLLTX2Video(**{**config, **changes}).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_mounted_vae_has_the_bits_of_stock(causal, batch, dtype):
    model = vae(decoder_causal=causal).to(dtype)
    video = torch.randn(batch, 3, 5, 8, 12, generator=torch.Generator().manual_seed(3)).to(dtype)

    @torch.inference_mode()
    def both():
        latents = model.encode(video).latent_dist.mode()
        return latents, model.decode(latents, return_dict=False)[0]

    expected = both()
    for half in (model.encoder, model.decoder):
        (each,) = mount(half, VAE_FORWARDS, allowed=ALL)
        assert each.report.mounted, each.report
    outcomes = []
    with fusion_scope(ALL, outcomes.append):
        assert_equal(both(), expected)
    resnets = sum(type(module).__name__ == "LTX2VideoResnetBlock3d" for module in model.modules())
    assert len(outcomes) == 2 * resnets
    assert {outcome.site for outcome in outcomes} == {"channel_norm_silu"}


def test_first_frames_are_encoded_by_mounted_resnets_with_equal_bits():
    settings = Ltx2Settings(height=64, width=64, frames=9, steps=2, image_crf=0)
    request = video_request("x", settings=settings, size="tiny", image=picture())
    components = tiny_components()
    components = replace(components, vae=copy.deepcopy(components.vae))
    expected = ours(components).run(request).digests
    fused = ours(components, policy=replace(EAGER, fused={"channel_norm_silu": True}))
    assert fused.run(request).digests == expected
    record = fused.record.stages["latent_preparation"]
    assert [each.mounted for each in record.mounts] == [True]
    encoder = components.vae.encoder.modules()
    resnets = sum(type(module).__name__ == "LTX2VideoResnetBlock3d" for module in encoder)
    assert {outcome.site: calls for outcome, calls in record.sites.items()} == {
        "channel_norm_silu": 2 * resnets
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"timestep_conditioning": True}, "timestep"), ({"decoder_inject_noise": (True, True)}, "noise")],
)
def test_resnets_with_more_inputs_keep_the_stock_forward(changes, words):
    (each,) = mount(vae(**changes).decoder, VAE_FORWARDS, allowed=ALL)
    assert each.report.reason is Reason.UNSUPPORTED_MODULE
    assert words in each.report.detail


def test_installed_library_is_the_one_the_forwards_were_written_for():
    """On drift: read what changed, adapt the forwards, then write the new fingerprints down."""
    forwards = (*TRANSFORMER_FORWARDS, *VAE_FORWARDS)
    installed = {qualified_name(code): fingerprint(code) for forward in forwards for code in forward.code}
    assert installed == KNOWN["0.42"]
