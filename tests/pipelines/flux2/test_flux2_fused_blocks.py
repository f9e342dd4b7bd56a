"""FLUX.2's mounted forwards: the bits of the stock ones, or the stock ones."""

import copy

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

from accel.fusion.mounting import fingerprint, mount, qualified_name
from accel.fusion.scope import fusion_scope
from accel.record import Reason
from accel.site_names import SITE_NAMES
from pipelines.flux2.fused_blocks import TRANSFORMER_FORWARDS
from pipelines.flux2.fused_resnets import VAE_FORWARDS
from pipelines.flux2.known_structure import KNOWN

ALL = frozenset(SITE_NAMES)


def transformer(**changes):
    torch.manual_seed(0)
    config = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 48,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": False,
    }
    model = Flux2Transformer2DModel(**{**config, **changes}).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:  # stock initial weights of 1 would hide a missing or swapped one
            weight.uniform_(0.5, 1.5)
    return model


def vae():
    torch.manual_seed(0)
    model = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight)
    return model.eval().requires_grad_(False)


def inputs(batch, *, image_tokens=7, text_tokens=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "hidden_states": draw(batch, image_tokens, 16),
        "encoder_hidden_states": draw(batch, text_tokens, 48),
        "timestep": torch.rand(batch, generator=generator).to(dtype),
        "img_ids": torch.arange(4 * image_tokens).reshape(image_tokens, 4),
        "txt_ids": torch.arange(4 * text_tokens).reshape(text_tokens, 4),
        "return_dict": False,
    }


@torch.inference_mode()
def run(model, arguments):
    return model(**arguments)[0]


def run_in_scope(model, arguments):
    outcomes = []
    with fusion_scope(ALL, outcomes.append):
        return run(model, arguments), outcomes


def mounted(model):
    mounts = mount(model, TRANSFORMER_FORWARDS, allowed=ALL)
    assert all(each.report.mounted for each in mounts), [each.report for each in mounts]
    return mounts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 3, "mlp_ratio": 2.5},
        {"attention_head_dim": 24, "axes_dims_rope": (2, 6, 8, 8), "num_layers": 1, "guidance_embeds": True},
    ],
    ids=["tiny", "odd", "dev"],
)
def test_mounted_transformer_has_the_bits_of_stock(changes, batch, dtype):
    model = transformer(**changes).to(dtype)
    arguments = inputs(batch, dtype=dtype)
    if changes.get("guidance_embeds"):
        arguments["guidance"] = torch.full((batch,), 4.0, dtype=dtype)
    expected = run(model, arguments)
    mounted(model)
    assert torch.equal(run(model, arguments), expected)
    fused, outcomes = run_in_scope(model, arguments)
    assert torch.equal(fused, expected)
    assert {outcome.reason for outcome in outcomes} == {Reason.NO_CUDA}
    sites = set().union(*(forward.sites for forward in TRANSFORMER_FORWARDS))
    assert {outcome.site for outcome in outcomes} == sites


def test_single_block_joins_and_splits_the_streams():
    model = transformer()
    block = model.single_transformer_blocks[0]
    generator = torch.Generator().manual_seed(2)
    text, image = torch.randn(2, 3, 32, generator=generator), torch.randn(2, 5, 32, generator=generator)
    angles = torch.randn(8, 16, generator=generator)
    arguments = (image, text, torch.randn(2, 96, generator=generator), (angles.cos(), angles.sin()))
    expected = block(*arguments, split_hidden_states=True)
    mounted(model)
    for actual, stock in zip(block(*arguments, split_hidden_states=True), expected, strict=True):
        assert torch.equal(actual, stock)


def test_fp16_that_overflows_is_clipped_as_in_stock():
    model = transformer(num_layers=1, num_single_layers=1).half()
    (double,), (single,) = model.transformer_blocks, model.single_transformer_blocks
    generator = torch.Generator().manual_seed(4)

    def large(tokens):
        return (6e4 * torch.randn(1, tokens, 32, generator=generator).sign()).half()

    def modulation(parts):
        """Shifts and scales as usual; the last part is a gate, with which the sum overflows."""
        values = torch.randn(1, parts * 32, generator=generator)
        values[:, -32:] *= 3e4
        return values.half()

    angles = torch.randn(8, 16, generator=generator)
    rope = angles.cos(), angles.sin()
    calls = (
        lambda: double(large(5), large(3), modulation(6), modulation(6), rope)[0],
        lambda: single(large(8), None, modulation(3), rope),
    )
    state = generator.get_state()
    expected = [call() for call in calls]
    mounted(model)
    generator.set_state(state)
    for call, stock in zip(calls, expected, strict=True):
        actual = call()
        assert (stock.abs() == 65504).any()
        assert torch.equal(actual, stock)


def test_arguments_that_are_not_covered_run_the_stock_forward():
    model = transformer()
    block = model.single_transformer_blocks[0]
    hidden, modulation = torch.randn(1, 6, 32), torch.randn(1, 96)
    expected = block(hidden, None, modulation)
    mounted(model)
    outcomes = []
    with fusion_scope(ALL, outcomes.append):
        assert torch.equal(block(hidden, None, modulation), expected)
    assert {outcome.site for outcome in outcomes} == TRANSFORMER_FORWARDS[1].sites
    assert {outcome.reason for outcome in outcomes} == {Reason.UNSUPPORTED_INPUT}


@pytest.mark.parametrize("site", sorted(TRANSFORMER_FORWARDS[0].sites | TRANSFORMER_FORWARDS[1].sites))
def test_result_is_right_whatever_the_kernel_does(kernel_behind, site):
    expected_outcome = kernel_behind(site)
    model, arguments = transformer(), inputs(2)
    expected = run(model, arguments)
    mounted(model)
    outcomes = []
    # Were all sites allowed, those that serve as parts of larger ones would not be called.
    with fusion_scope(frozenset({site}), outcomes.append):
        actual = run(model, arguments)
    assert torch.equal(actual, expected)
    judged = {(outcome.fused, outcome.reason) for outcome in outcomes if outcome.site == site}
    assert judged == {expected_outcome}


def test_copy_of_a_mounted_model_computes_with_its_own_weights():
    model, arguments = transformer(), inputs(1)
    mounted(model)
    twin = copy.deepcopy(model)
    twin.transformer_blocks[0].ff.linear_in.weight.mul_(2)
    expected = transformer()
    expected.transformer_blocks[0].ff.linear_in.weight.mul_(2)
    assert torch.equal(run(twin, arguments), run(expected, arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_mounted_vae_has_the_bits_of_stock(batch, dtype):
    model = vae().to(dtype)
    image = torch.randn(batch, 3, 24, 16, generator=torch.Generator().manual_seed(3)).to(dtype)

    @torch.inference_mode()
    def both():
        latents = model.encode(image).latent_dist.mode()
        return latents, model.decode(latents).sample

    expected = both()
    for half in (model.encoder, model.decoder):
        (vae_mount,) = mount(half, VAE_FORWARDS, allowed=ALL)
        assert vae_mount.report.mounted, vae_mount.report
    outcomes = []
    with fusion_scope(ALL, outcomes.append):
        actual = both()
    for mine, stock in zip(actual, expected, strict=True):
        assert torch.equal(mine, stock)
    resnets = sum(type(module).__name__ == "ResnetBlock2D" for module in model.modules())
    assert len(outcomes) == 2 * resnets
    assert {outcome.site for outcome in outcomes} == {"group_norm_silu"}


def test_installed_library_is_the_one_the_forwards_were_written_for():
    """On drift: read what changed, adapt the forwards, then write the new fingerprints down."""
    forwards = (*TRANSFORMER_FORWARDS, *VAE_FORWARDS)
    installed = {qualified_name(code): fingerprint(code) for forward in forwards for code in forward.code}
    assert installed == KNOWN["0.42"]
