"""The video encoder against recorded tensors, and neighbourhood attention against a dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from accel.errors import ConfigError
from pipelines.flux3_action.neighbourhood_attention import (
    Axis,
    build_neighbourhood,
    neighbourhood_attention,
)
from pipelines.flux3_action.video_vae import LatentNormalizer, VideoEncoder, VideoEncoderConfig
from pipelines.flux3_action.video_vae_layers import Attention, PatchMerging, TemporalMerging

FP32 = torch.float32


def synthetic_canvas(height: int, width: int, s: int) -> Tensor:
    """The picture of the recorded cases, (1, 3, 1, H, W) in [-1, 1]."""
    y = torch.arange(height)[:, None, None]
    x = torch.arange(width)[None, :, None]
    c = torch.arange(3)
    pixels = (7 * y * y + 13 * x + (3 + s) * x * y + 71 * c + 37 * s + (x * x) // (5 + s)) % 256
    return (pixels.float() / 255 * 2 - 1).permute(2, 0, 1)[None, :, None]


def load(module: torch.nn.Module, tensors: dict[str, Tensor], prefix: str) -> None:
    for name, slot in module.state_dict().items():
        slot.copy_(tensors[f"{prefix}{name}"])


def tiny_encoder(golden, case, dtype: torch.dtype) -> VideoEncoder:
    config = VideoEncoderConfig(
        embed_dim=case["config"]["embed_dim"],
        num_heads=tuple(case["config"]["num_heads"]),
        depths=tuple(case["config"]["enc_depths"]),
    )
    encoder = VideoEncoder(config, dtype=dtype)
    weights = golden("vae.safetensors")
    slots = encoder.checkpoint_slots()
    assert slots.keys() == weights.keys()
    for key, slot in slots.items():
        assert slot.shape == weights[key].shape, key
        slot.copy_(weights[key])
    return encoder


@pytest.mark.parametrize("name", ["vae_encode_frame_0", "vae_encode_frame_1"])
def test_every_stage_of_the_encoder(golden, golden_case, name):
    case = golden_case(name)
    recorded = golden(case["file"])
    encoder = tiny_encoder(golden, case, FP32)
    seen: dict[str, Tensor] = {}
    layers = {f"features.{i}": layer for i, layer in enumerate(encoder.encoder.features)}
    for key, layer in {"patch_embed": encoder.encoder.patch_embed, **layers}.items():
        layer.register_forward_hook(lambda _m, _i, out, key=key: seen.__setitem__(key, out))
    canvas = synthetic_canvas(*case["config"]["canvas_hw"], case["inputs"]["s"])
    seen["latent_fp32"] = encoder.encode(canvas)
    tolerance = {key: case["tol"][key] for key in ("atol", "rtol")}
    for role, tensor in case["outputs"].items():
        if role == "latent_bf16":
            continue
        out = seen[role][:, :, ::7, ::5] if role in case["strided"] else seen[role]
        torch.testing.assert_close(out, recorded[tensor], **tolerance, msg=lambda m, r=role: f"{r}: {m}")


@pytest.mark.parametrize("name", ["vae_encode_frame_0", "vae_encode_frame_1"])
def test_encoder_in_bf16(golden, golden_case, name):
    case = golden_case(name)
    expected = golden(case["file"])[case["outputs"]["latent_bf16"]].float()
    encoder = tiny_encoder(golden, case, torch.bfloat16)
    out = encoder.encode(synthetic_canvas(*case["config"]["canvas_hw"], case["inputs"]["s"]))
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() / expected.norm() < case["tol"]["bf16"]["rel_l2"]


@pytest.mark.parametrize("name", ["2d", "3d", "2d_exact"])
def test_attention_layer(golden, golden_case, name):
    case = golden_case(f"vae_attention_{name}")
    tensors = golden(case["file"])
    attention = Attention(case["config"]["dim"], case["config"]["num_heads"], (5, 5, 5), FP32)
    load(attention, tensors, "attn.")
    x = tensors[case["inputs"]["x"]]
    attention.prepare(tuple(x.shape[1:4]))
    torch.testing.assert_close(attention(x), tensors[case["outputs"]["out"]], **case["tol"])


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_temporal_merging(golden, golden_case, frames):
    case = golden_case("vae_temporal_merging")
    tensors = golden(case["file"])
    merge = TemporalMerging(12, FP32)
    load(merge, tensors, "tmerge.")
    x, expected = tensors[f"tmerge.{frames}.x"], tensors[f"tmerge.{frames}.out"]
    torch.testing.assert_close(merge(x), expected, **case["tol"])
    assert merge.prepare(tuple(x.shape[1:4])) == tuple(expected.shape[1:4])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_patch_merging(golden, golden_case, index):
    case = golden_case("vae_patch_merging")
    tensors = golden(case["file"])
    merge = PatchMerging(6, 10, FP32)
    load(merge, tensors, "pmerge.")
    x, expected = tensors[f"pmerge.{index}.x"], tensors[f"pmerge.{index}.out"]
    torch.testing.assert_close(merge(x), expected, **case["tol"])
    assert merge.prepare(tuple(x.shape[1:4])) == tuple(expected.shape[1:4])


def test_latent_normalization(golden, golden_case):
    case = golden_case("vae_latent_normalization")
    tensors = golden(case["file"])
    normalizer = LatentNormalizer(6, FP32)
    normalizer.running_mean.copy_(tensors["znorm.running_mean"])
    normalizer.running_var.copy_(tensors["znorm.running_var"])
    torch.testing.assert_close(normalizer(tensors["znorm.x"]), tensors["znorm.out"], **case["tol"])


def test_released_encoder_has_the_keys_and_size_of_the_checkpoint():
    with torch.device("meta"):
        encoder = VideoEncoder(VideoEncoderConfig(), dtype=torch.bfloat16)
    slots = encoder.checkpoint_slots()
    assert len(slots) == 275
    assert sum(p.numel() for p in encoder.parameters()) == 649_245_120
    assert slots["model.encoder.features.6.attn.qkv.weight"].shape == (6144, 2048)
    assert slots["model.encoder.features.8.7.mlp.gate_up_proj.weight"].shape == (11008, 2048)
    assert slots["model.encoder.patch_embed.proj.weight"].shape == (256, 3, 1, 4, 4)
    assert slots["model.encoder.features.0.0.attn.rope.inv_freq"].shape == (4, 8)
    assert not any(p.requires_grad for p in encoder.parameters())


def test_frequencies_of_head_dim_64_survive_bf16():
    rope = Attention(64, 1, (5, 5, 5), torch.bfloat16).rope
    assert rope.inv_freq[0].tolist() == [2.0**-i for i in range(8)]
    assert torch.equal(rope.inv_freq.bfloat16().float(), rope.inv_freq)


def test_batch_and_frames(golden, golden_case):
    encoder = tiny_encoder(golden, golden_case("vae_encode_frame_0"), FP32)
    one, two = synthetic_canvas(160, 160, 1), synthetic_canvas(160, 160, 2)
    batch = encoder.encode(torch.cat([one, two]))
    torch.testing.assert_close(batch, torch.cat([encoder.encode(one), encoder.encode(two)]))
    clip = encoder.encode(torch.cat([one, two, one, two, one], dim=2))
    assert clip.shape == (1, 96, 2, 5, 5)


def test_causal_in_time():
    """A later frame does not change an earlier position."""
    axes = [Axis(6, 5, causal=True), Axis(5, 5), Axis(5, 5)]
    tables = build_neighbourhood(axes)
    x = torch.randn(1, 150, 1, 8, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 125:] += 1  # the last frame
    before, after = (neighbourhood_attention(v, v, v, tables) for v in (x, changed))
    assert torch.equal(before[:, :125], after[:, :125])
    assert not torch.equal(before[:, 125:], after[:, 125:])


def test_encode_only_reads_once_the_canvas_is_prepared(golden, golden_case, monkeypatch):
    encoder = tiny_encoder(golden, golden_case("vae_encode_frame_0"), FP32)
    encoder.prepare((1, 160, 160))
    monkeypatch.setattr(
        "pipelines.flux3_action.video_vae_layers.build_neighbourhood", lambda axes: pytest.fail("built again")
    )
    assert encoder.encode(synthetic_canvas(160, 160, 0)).isfinite().all()


@pytest.mark.parametrize("hw", [(128, 192), (192, 96)])
def test_small_canvas_is_refused_with_the_smallest_legal_one(golden, golden_case, hw):
    encoder = tiny_encoder(golden, golden_case("vae_encode_frame_0"), FP32)
    with pytest.raises(ConfigError, match="160 px per side"):
        encoder.prepare((1, *hw))


def test_axis_shorter_than_its_window_is_refused():
    with pytest.raises(ConfigError, match="4 positions"):
        build_neighbourhood([Axis(9, 5), Axis(4, 5)])


def window(axis: Axis) -> Tensor:
    """(n, n) bool, straight from the definition."""
    n, k = axis.length, axis.window
    allowed = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        start = max(0, i - k + 1) if axis.causal else min(max(i - k // 2, 0), n - k)
        stop = i + 1 if axis.causal else start + k
        allowed[i, start:stop] = True
    return allowed


GRIDS = [
    [Axis(5, 5)],
    [Axis(17, 5), Axis(23, 5)],
    [Axis(5, 5), Axis(5, 5)],
    [Axis(8, 5), Axis(16, 5)],
    [Axis(9, 3), Axis(7, 7)],
    [Axis(13, 4), Axis(11, 2)],  # even windows
    [Axis(1, 5, causal=True), Axis(9, 5), Axis(12, 5)],
    [Axis(3, 5, causal=True), Axis(5, 5), Axis(6, 5)],
    [Axis(11, 5, causal=True), Axis(6, 5), Axis(9, 5)],
]


@pytest.mark.parametrize("axes", GRIDS, ids=lambda axes: "x".join(f"{a.length}w{a.window}" for a in axes))
def test_tiles_equal_a_dense_mask(axes):
    allowed = torch.ones(1, 1, dtype=torch.bool)
    for axis in axes:
        allowed = torch.kron(allowed.int(), window(axis).int()).bool()
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, len(allowed), 2, 16, generator=generator)
    dense = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=allowed
    )
    tiled = neighbourhood_attention(q, k, v, build_neighbourhood(axes))
    torch.testing.assert_close(tiled, dense.transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_encoder_replays_in_a_cuda_graph(golden, golden_case):
    encoder = tiny_encoder(golden, golden_case("vae_encode_frame_0"), torch.bfloat16).cuda()
    pixels = synthetic_canvas(544, 736, 0).to("cuda", torch.bfloat16)
    with torch.no_grad():
        encoder.encode(pixels)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            latent = encoder.encode(pixels)
        pixels.copy_(synthetic_canvas(544, 736, 1))
        graph.replay()
        assert torch.equal(latent, encoder.encode(pixels))
