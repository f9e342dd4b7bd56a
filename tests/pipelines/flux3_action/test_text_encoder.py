"""The caption encoder against the goldens and against transformers' own text model (spec section 7)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from accel.errors import CheckpointError
from pipelines.checkpoint import load_into, open_checkpoint
from pipelines.flux3_action.synthetic import fill_synthetic
from pipelines.flux3_action.text_encoder import (
    CaptionEncoder,
    qwen3_vl_4b_config,
    read_text_config,
    text_key_prefix,
    tiny_text_config,
    unused_text_keys,
)

CPU = torch.device("cpu")


def encode(encoder: CaptionEncoder, input_ids: torch.Tensor, n_tokens: int) -> torch.Tensor:
    with torch.inference_mode():
        return encoder(input_ids, *encoder.prepare(n_tokens, input_ids.shape[1], device=CPU))


@pytest.fixture
def folder(golden, golden_case, tmp_path):
    """The golden weights as a Qwen3-VL folder, with a vision tower and a head that captions don't need."""
    extra = {"lm_head.weight": torch.zeros(72, 32), "model.visual.patch_embed.proj.weight": torch.zeros(4)}
    save_file({**golden("text_encoder.safetensors"), **extra}, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_vl", "text_config": golden_case("text_encoder")["config"]["text_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def load(folder, output_layers, dtype, **options) -> CaptionEncoder:
    config, checkpoint = read_text_config(folder), open_checkpoint(folder)
    encoder = CaptionEncoder(config, output_layers=output_layers, dtype=dtype, **options)
    prefix = text_key_prefix(checkpoint.entries)
    unused = unused_text_keys(config, output_layers, prefix)
    load_into(checkpoint, encoder.checkpoint_slots(), prefix=prefix, ignore=unused)
    return encoder


@pytest.mark.parametrize(
    ("output", "dtype", "padding_positions"),
    [
        ("context_fp32", torch.float32, "running"),
        ("context_bf16", torch.bfloat16, "running"),
        ("context_fp32_pads_at_1", torch.float32, "ones"),
    ],
)
def test_golden(folder, golden, golden_case, output, dtype, padding_positions):
    case, tensors = golden_case("text_encoder"), golden("text_outputs.safetensors")
    layers = case["config"]["output_layers"]
    encoder = load(folder, layers, dtype, padding_positions=padding_positions)
    rows = zip(tensors["input_ids"].long(), tensors["attention_mask"], tensors[output], strict=True)
    for input_ids, mask, expected in rows:
        context = encode(encoder, input_ids[None], int(mask.sum()))
        assert context.dtype == dtype
        assert context.shape == (1, *expected.shape)
        if dtype == torch.float32:
            torch.testing.assert_close(context[0], expected, atol=1e-4, rtol=1e-4)
        else:
            error = (context[0].float() - expected.float()).norm() / expected.float().norm()
            assert error < case["tol"]["bf16"]["rel_l2"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_tokens", [1, 37, 80])
def test_same_bits_as_the_library_model(n_tokens, dtype):
    config = tiny_text_config(vocabulary=259)
    encoder = CaptionEncoder(config, output_layers=(0, 1, 2), dtype=dtype)
    slots = encoder.checkpoint_slots()
    fill_synthetic(slots, seed=1, prefix="")
    library = Qwen3VLTextModel(config).to(dtype).eval()
    # Its own cast rounds the frequencies; loading from a folder, which is what runs elsewhere, does not.
    library.rotary_emb = type(library.rotary_emb)(config)
    library.load_state_dict(slots, strict=False)
    input_ids = torch.randint(0, 259, (1, 80), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(80) < n_tokens).long()[None]
    with torch.inference_mode():
        states = library(
            input_ids=input_ids, attention_mask=mask, output_hidden_states=True, use_cache=False
        ).hidden_states
    expected = torch.cat(states[:3], dim=-1)
    context = encode(encoder, input_ids, n_tokens)
    if n_tokens < 80:
        assert torch.equal(context, expected)
    else:  # without padding the library drops the mask and may take another kernel
        distance = (context - expected).float().norm() / expected.float().norm()
        assert distance < {torch.float32: 1e-6, torch.bfloat16: 0.01}[dtype]


def test_position_switch_changes_padding_rows_alone(folder):
    ids = torch.arange(20)[None]
    running, ones = (
        encode(load(folder, (1, 4), torch.float32, padding_positions=p), ids, 12) for p in ("running", "ones")
    )
    assert torch.equal(running[:, :12], ones[:, :12])
    assert not torch.allclose(running[:, 12:, 32:], ones[:, 12:, 32:])


def test_context_is_layer_major_inputs_of_layers(folder, golden):
    ids = torch.arange(20)[None]
    context = encode(load(folder, (0, 2), torch.float32), ids, 20)
    embedding = golden("text_encoder.safetensors")["model.language_model.embed_tokens.weight"].float()
    assert torch.equal(context[0, :, :32], embedding[:20])
    assert context.shape == (1, 20, 64)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_spellings_of_the_keys(folder, golden, prefix):
    expected = load(folder, (1, 4), torch.bfloat16).checkpoint_slots()
    renamed = {
        name.replace("model.language_model.", prefix): tensor
        for name, tensor in golden("text_encoder.safetensors").items()
    }
    save_file(renamed, folder / "model.safetensors")
    slots = load(folder, (1, 4), torch.bfloat16).checkpoint_slots()
    assert slots.keys() == expected.keys()
    assert all(torch.equal(slots[name], expected[name]) for name in expected)


def test_missing_layer_is_named(folder, golden):
    tensors = dict(golden("text_encoder.safetensors"))
    del tensors["model.language_model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"1 missing tensors: model.language_model.layers.0.self_attn.q"
    ):
        load(folder, (1, 4), torch.bfloat16)


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 6)])
def test_layers_that_the_model_lacks(folder, layers):
    with pytest.raises(CheckpointError, match="output layers"):
        CaptionEncoder(read_text_config(folder), output_layers=layers, dtype=torch.float32)


def test_older_configs_spell_rope_differently(tmp_path):
    scaling = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {"model_type": "qwen3_vl_text", "rope_theta": 5000000, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert read_text_config(tmp_path).rope_parameters["rope_theta"] == 5000000


def test_other_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(CheckpointError, match="not a Qwen3-VL text encoder"):
        read_text_config(tmp_path)


def test_released_architecture_has_the_published_size():
    with torch.device("meta"):
        encoder = CaptionEncoder(
            qwen3_vl_4b_config(), output_layers=(4, 8, 12, 16, 20, 24, 28, 32), dtype=torch.bfloat16
        )
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 3_618_742_272
    assert isinstance(qwen3_vl_4b_config(), Qwen3VLTextConfig)


@pytest.mark.gpu
def test_replayed_graph_gives_the_eager_bits():
    device = torch.device("cuda")
    with device:
        encoder = CaptionEncoder(tiny_text_config(vocabulary=259), output_layers=(1, 2), dtype=torch.bfloat16)
    fill_synthetic(encoder.checkpoint_slots(), seed=0, prefix="")
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        (
            torch.randint(0, 259, (1, 80), generator=generator, device=device),
            *encoder.prepare(n, 80, device=device),
        )
        for n in (30, 75)
    ]
    with torch.inference_mode():
        eager = [encoder(*arguments) for arguments in inputs]
        static = [argument.clone() for argument in inputs[0]]
        encoder(*static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = encoder(*static)
        for arguments, expected in zip(inputs, eager, strict=True):
            for slot, argument in zip(static, arguments, strict=True):
                slot.copy_(argument)
            graph.replay()
            assert torch.equal(output, expected)
