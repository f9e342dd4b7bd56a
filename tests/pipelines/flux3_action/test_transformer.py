import pytest
import torch

from accel.fusion import qk_norm_rope
from accel.fusion.segments import token_rows
from pipelines.flux3_action.layers import Block, Modulation, concat_modulations, run_blocks
from pipelines.flux3_action.policy_config import TransformerConfig
from pipelines.flux3_action.position_ids import text_position_ids
from pipelines.flux3_action.rope import rope_table
from pipelines.flux3_action.transformer import TEXT, ActionTransformer, timestep_embedding

MODALITY = "action_prediction_droid"
STREAMS = {"video": 96, "video_cond": 96, MODALITY: 8, f"{MODALITY}_cond": 8}
ROLES = {"video": "video", "video_cond": "video_cond", MODALITY: "action", f"{MODALITY}_cond": "action_cond"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tiny_config(dit_config):
    return TransformerConfig(
        in_channels=STREAMS, **(dit_config | {"axes_dim": tuple(dit_config["axes_dim"])})
    )


def load(config, weights, dtype, quantization=None):
    model = ActionTransformer(config, dtype=dtype, quantization=quantization)
    slots = model.checkpoint_slots()
    assert {f"dit.{key}" for key in slots} == set(weights)
    for key, slot in slots.items():
        assert slot.shape == weights[f"dit.{key}"].shape
        slot.copy_(weights[f"dit.{key}"])
    return model


@pytest.fixture(scope="module")
def models(golden, golden_case):
    case = golden_case("dit_fp32")
    config = tiny_config(case["config"]["dit_config"])
    weights = golden(case["weights"])
    return {name: load(config, weights, dtype) for name, dtype in DTYPES.items()}


class Inputs:
    """The golden inputs in a model's dtype, as `ActionTransformer.forward` takes them."""

    def __init__(self, model, tensors, context="ctx", streams=tuple(STREAMS), t_video=0.937, t_action=0.937):
        table = {"axes_dim": model.config.axes_dim, "theta": model.config.theta}
        self.context = tensors[context].to(model.dtype)
        self.tokens = {s: tensors[f"x_{ROLES[s]}"].to(model.dtype) for s in streams}
        self.ropes = {s: rope_table(tensors[f"x_{ROLES[s]}_ids"], **table) for s in streams}
        self.ropes[TEXT] = rope_table(text_position_ids(self.context.shape[1]), **table)
        self.times = {"video": torch.as_tensor(t_video).reshape(1, -1), MODALITY: torch.tensor([t_action])}

    def run(self, model, vector=None):
        return model(self.context, self.tokens, self.ropes, self.times, vector)


def assert_near(actual, expected, tol):
    assert actual.dtype == expected.dtype
    if "rel_l2" in tol:
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error <= tol["rel_l2"]
    else:
        torch.testing.assert_close(actual, expected, atol=tol["atol"], rtol=tol["rtol"])


def test_timestep_embedding(golden, golden_case):
    case = golden_case("timestep_embedding")
    tensors, names = golden(case["file"]), case["inputs"] | case["outputs"]
    for t, channels, out in (("t", 256, "dim256"), ("t", 64, "dim64"), ("t_2d", 256, "dim256_2d")):
        assert_near(timestep_embedding(tensors[names[t]], channels), tensors[names[out]], case["tol"])


@pytest.mark.parametrize("name", ["rope_real", "rope_tiny"])
def test_rope(golden, golden_case, name):
    case = golden_case(name)
    tensors, names = golden(case["file"]), case["inputs"] | case["outputs"]
    table = rope_table(tensors["rope.ids"], **case["config"])
    assert_near(table, tensors[names["cos_sin"]], case["tol"])
    q, k = tensors[case["inputs"]["q"]], tensors[case["inputs"]["k"]]
    ones = torch.ones(q.shape[-1])
    rotated = qk_norm_rope(q, k, ones, ones, table)
    for x, turned, role in zip((q, k), rotated, "qk", strict=True):
        rms = x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()  # a rotation commutes with the norm
        assert_near(turned * rms, tensors[case["outputs"][role]], case["tol"])


@pytest.mark.parametrize(("suffix", "dtype"), [("", torch.float32), ("_bf16", torch.bfloat16)])
def test_qk_norm(golden, golden_case, suffix, dtype):
    case = golden_case("qk_rmsnorm")
    tensors, names = golden(case["file"]), case["inputs"]
    q, k, q_scale, k_scale = (tensors[names[n]].to(dtype) for n in names)
    no_turn = rope_table(torch.zeros(1, q.shape[1], 1), axes_dim=(q.shape[-1],), theta=10000.0)
    for actual, role in zip(qk_norm_rope(q, k, q_scale, k_scale, no_turn), "qk", strict=True):
        expected = tensors[case["outputs"][role + suffix]]
        if suffix:
            assert torch.equal(actual, expected)
        else:
            assert_near(actual, expected, case["tol"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_of_an_evaluation(golden, golden_case, models, precision):
    case, model = golden_case(f"dit_{precision}"), models[precision]
    expected = {role: golden(case["file"])[name] for role, name in case["outputs"].items()}
    inputs = Inputs(model, golden(case["inputs_file"]))
    segments = [TEXT, *STREAMS]
    hidden, joint = [], []
    for stream in segments:
        role = ROLES.get(stream, stream)
        t = inputs.times.get(stream, torch.zeros(1))
        vec = model.time_vector(t)
        assert_near(vec, expected[f"{role}.vec"], case["tol"])
        early, rope = model.early_modulation(stream, vec), inputs.ropes[stream]
        if f"{role}.rope" in expected:
            assert_near(rope, expected[f"{role}.rope"], case["tol"])
        joint.append(model.joint_modulation(stream, vec))
        for part in ("shift", "scale", "gate"):
            assert_near(getattr(joint[-1], part), expected[f"{role}.joint_{part}"], case["tol"])
        hidden.append(
            model.embed_text(inputs.context, early, rope)
            if stream == TEXT
            else model.embed_stream(stream, inputs.tokens[stream], early, rope)
        )
        assert_near(hidden[-1], expected[f"{role}.hidden"], case["tol"])
    sequence = torch.cat(hidden, dim=1)
    modulation = concat_modulations(joint, [h.shape[1] for h in hidden])
    rope = torch.cat([inputs.ropes[s] for s in segments], dim=1)
    for i, block in enumerate(model.single_blocks):
        sequence = run_blocks([block], sequence, modulation, rope)
        assert_near(sequence, expected[f"joint.{i}"], case["tol"])
    velocities = inputs.run(model)
    for stream, velocity in velocities.items():
        assert_near(velocity, expected[f"out.{ROLES[stream]}"], case["tol"])


@pytest.mark.parametrize(
    "name", ["dit_fp32_uncond", "dit_fp32_vector", "dit_fp32_per_token_t", "dit_fp32_no_conditioning_streams"]
)
def test_variations_of_an_evaluation(golden, golden_case, models, name):
    case, tensors = golden_case(name), golden("dit_inputs.safetensors")
    config, model = case["config"], models["fp32"]
    t_video = config["t_video"]
    inputs = Inputs(
        model,
        tensors,
        context=config.get("context", "ctx"),
        streams=config.get("streams", tuple(STREAMS)),
        t_video=tensors[t_video.split()[0]] if isinstance(t_video, str) else t_video,
        t_action=config["t_action"],
    )
    velocities = inputs.run(model, vector=tensors["vector"] if "vector" in config else None)
    for role, output in case["outputs"].items():
        stream = next(s for s, r in ROLES.items() if f"out.{r}" == role)
        assert_near(velocities[stream], golden(case["file"])[output], case["tol"])


@pytest.mark.parametrize(
    ("name", "output", "precision"),
    [("dit_block", "fp32", "fp32"), ("dit_block", "bf16", "bf16"), ("dit_small_variance", "block", "fp32")],
)
def test_one_joint_block(golden, golden_case, models, name, output, precision):
    case, model = golden_case(name), models[precision]
    tensors, names = golden(case["file"]), case["inputs"]
    x, shift, scale, gate = (tensors[names[n]].to(model.dtype) for n in ("x", "shift", "scale", "gate"))
    rope = rope_table(tensors[names["ids"]], axes_dim=model.config.axes_dim, theta=model.config.theta)
    out = run_blocks([model.single_blocks[0]], x, Modulation(shift, scale, gate), rope)
    assert_near(out, tensors[case["outputs"][output]], case["tol"].get(precision, case["tol"]))


@pytest.mark.parametrize(
    ("name", "output", "precision"),
    [
        ("dit_last_layer", "fp32", "fp32"),
        ("dit_last_layer", "bf16", "bf16"),
        ("dit_small_variance", "last", "fp32"),
    ],
)
def test_one_head(golden, golden_case, models, name, output, precision):
    case, model = golden_case(name), models[precision]
    tensors, names = golden(case["file"]), case["inputs"]
    x, vec = (tensors[names[n]].to(model.dtype) for n in ("x", "vec"))
    out = model.head("video", x, *model.final_modulation("video", vec))
    assert_near(out, tensors[case["outputs"][output]], case["tol"].get(precision, case["tol"]))


def test_fp8r_model(golden, golden_case):
    case = golden_case("fp8r_model")
    config = tiny_config(case["config"]["dit_config"])
    model = load(config, golden(case["weights"]), torch.bfloat16, quantization="fp8r")
    inputs = Inputs(model, golden(case["inputs_file"]))
    expected = {role: golden(case["file"])[name] for role, name in case["outputs"].items()}
    for stream in STREAMS:
        t = inputs.times.get(stream, torch.zeros(1))
        early = model.early_modulation(stream, model.time_vector(t))
        hidden = model.embed_stream(stream, inputs.tokens[stream], early, inputs.ropes[stream])
        assert_near(hidden, expected[f"{ROLES[stream]}.hidden"], case["tol"])
    early = model.early_modulation(TEXT, model.time_vector(torch.zeros(1)))
    hidden = model.embed_text(inputs.context, early, inputs.ropes[TEXT])
    assert_near(hidden, expected["txt.hidden"], case["tol"])
    velocities = inputs.run(model)
    for stream in ("video", MODALITY):
        assert_near(velocities[stream], expected[f"out.{ROLES[stream]}"], case["tol"])


def test_per_token_modulation_has_the_bits_of_segment_modulation():
    """Modulating, normalising and adding once over the whole sequence equals doing so per segment."""
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 5, 1)
    make = lambda: Modulation(*torch.randn(3, 1, 1, 8, generator=generator).bfloat16())  # noqa: E731
    modulations = [make() for _ in lengths]
    joined = concat_modulations(modulations, lengths)
    x = torch.randn(1, sum(lengths), 8, generator=generator).bfloat16()
    shift, scale = token_rows(joined.shift), token_rows(joined.scale)
    assert shift.shape == x.shape
    whole = (1 + scale) * x + shift
    parts = [
        (1 + m.scale) * part + m.shift for m, part in zip(modulations, x.split(lengths, dim=1), strict=True)
    ]
    assert torch.equal(whole, torch.cat(parts, dim=1))


def test_vector_of_zeros_may_be_skipped(models):
    for model in models.values():
        t, zeros = torch.tensor([0.937]), torch.zeros(1, 16, dtype=model.dtype)
        assert torch.equal(model.time_vector(t), model.time_vector(t, zeros))


def test_released_architecture_has_the_published_size():
    with torch.device("meta"):
        model = ActionTransformer(TransformerConfig(in_channels=STREAMS), dtype=torch.bfloat16)
        quantized = ActionTransformer(
            TransformerConfig(in_channels=STREAMS), dtype=torch.bfloat16, quantization="fp8r"
        )
    slots = model.checkpoint_slots()
    assert len(slots) == 451
    assert sum(slot.numel() for slot in slots.values()) == 6_947_058_944
    assert slots["single_blocks.27.mlp_in.weight"].shape == (18432, 3072)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert sum(p.nbytes for p in quantized.parameters()) == pytest.approx(7.1e9, rel=0.02)


def test_a_model_without_vector_input_has_no_such_tensors():
    config = TransformerConfig(
        in_channels=STREAMS, hidden_size=16, num_heads=2, axes_dim=(2, 2, 2, 2), context_in_dim=8,
        vec_in_dim=None, depth=1, depth_single_blocks=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = ActionTransformer(config, dtype=torch.bfloat16)
    assert not any(key.startswith("vector_in") for key in model.checkpoint_slots())
    with pytest.raises(ValueError, match="vec_in_dim"):
        model.time_vector(torch.zeros(1, device="meta"), torch.zeros(1, 8, device="meta"))


def test_value_stays_a_view_of_the_projection(monkeypatch):
    """Attention reads values straight out of the packed projection, without a copy."""
    config = TransformerConfig(
        in_channels=STREAMS, hidden_size=16, num_heads=2, axes_dim=(2, 2, 2, 2), depth=1,
    )  # fmt: skip
    block = Block(config, torch.nn.Linear, dtype=torch.float32)
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v: seen.append(v) or attend(q, k, v),
    )
    for scale in (block.norm.query_norm.scale, block.norm.key_norm.scale):
        scale.fill_(1.0)
    rope = rope_table(text_position_ids(3), axes_dim=config.axes_dim, theta=config.theta)
    block(torch.randn(1, 3, 16), rope)
    assert seen[0].stride(2) == 3 * 16 + 2 * config.mlp_hidden


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "fp8r"])
def test_an_evaluation_can_be_captured(golden, quantization):
    config = TransformerConfig(
        in_channels=STREAMS, hidden_size=512, num_heads=4, context_in_dim=48, depth=1, depth_single_blocks=2,
    )  # fmt: skip
    with torch.device("cuda"):
        model = ActionTransformer(config, dtype=torch.bfloat16, quantization=quantization)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.02)
    tensors = {key: value.cuda() for key, value in golden("dit_inputs.safetensors").items()}
    inputs = Inputs(model, tensors | {"ctx": torch.randn(1, 10, 48, device="cuda")})
    inputs.times = {stream: t.cuda() for stream, t in inputs.times.items()}
    inputs.ropes[TEXT] = inputs.ropes[TEXT].cuda()
    eager = inputs.run(model)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = inputs.run(model)
    graph.replay()
    assert all(torch.equal(captured[stream], eager[stream]) for stream in STREAMS)
