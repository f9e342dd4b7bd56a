"""Keys and values of the text are made once a request, and attention to them has the library's bits."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    LTX2AudioVideoAttnProcessor,
    LTX2PerturbedAttnProcessor,
)
from ltx2_harness import (
    ALL_SAME,
    EAGER,
    NO_GUIDANCE,
    ours,
    rebuilt,
    same_outputs,
    stock,
    stock_around,
    tiny_components,
)
from torch import Tensor

import pipelines.ltx2.denoising as denoising
from pipelines.ltx2.components import Components
from pipelines.ltx2.request import VideoRequest, video_request
from pipelines.ltx2.settings import Ltx2Settings
from pipelines.ltx2.text_attention import KeysAndValues, TextAttnProcessor, accept_keys
from pipelines.ltx2.text_keys import TextKeys, text_keys
from pipelines.ltx2.transformer_pass import Text

TEXT_ONLY = {**NO_GUIDANCE, "guidance": 3.0}
STEPS, BLOCKS, TEXT = 3, 2, 8
ROWS, TOKENS = 2, 5
LAYERS = ("to_k", "norm_k", "to_v")


def request(variant: str = "2.0", *, two_stage: bool = False, **settings: Any) -> VideoRequest:
    size = 128 if two_stage else 64
    small = {"height": size, "width": size, "frames": 9, "steps": STEPS, "two_stage": two_stage}
    choice = Ltx2Settings(**{**small, "variant": variant, **settings})
    return video_request("A red kite", settings=choice, size="tiny", seed=7)


@contextmanager
def rows_of_text_projections(transformer: Any) -> Iterator[Counter[tuple[str, int]]]:
    """(layer, rows of its input) -> calls, of the layers that make keys and values of the text."""
    calls: Counter[tuple[str, int]] = Counter()

    def note(name: str) -> Any:
        return lambda _, args: calls.update([(name, args[0].shape[0])])

    handles = [
        getattr(getattr(block, attention), layer).register_forward_pre_hook(note(f"{attention}.{layer}"))
        for block in transformer.transformer_blocks
        for attention in ("attn2", "audio_attn2")
        for layer in LAYERS
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def once_a_block(*rows: int) -> dict[tuple[str, int], int]:
    """The calls of one computation for each number of rows."""
    layers = [f"{attention}.{layer}" for attention in ("attn2", "audio_attn2") for layer in LAYERS]
    return {(layer, count): BLOCKS for layer in layers for count in rows}


@pytest.mark.parametrize(
    ("guidance", "rows"),
    [(NO_GUIDANCE, [1]), (TEXT_ONLY, [2]), ({}, [2, 1]), ({**NO_GUIDANCE, "stg": 1.0}, [1])],
    ids=["off", "text", "all", "stg"],
)
def test_once_a_request_for_each_kind_of_rows(guidance: dict[str, Any], rows: list[int]) -> None:
    components = tiny_components()
    pipeline = ours(components)
    with rows_of_text_projections(components.transformer) as calls:
        pipeline.run(request(**guidance))
    assert calls == once_a_block(*rows)


def test_a_perturbed_pass_without_effect_gets_no_keys() -> None:
    """Where it is left out they would be made in vain."""
    asked = request(guidance_modality=1.0)
    assert asked.guidance.stg
    components = tiny_components()
    pipeline = ours(components, policy=replace(EAGER, fused={"skip_ineffective_stg": True}))
    with rows_of_text_projections(components.transformer) as calls:
        pipeline.run(asked)
    assert calls == once_a_block(2)


def test_once_for_each_of_two_stages() -> None:
    components = tiny_components(two_stage=True)
    pipeline = ours(components)
    with rows_of_text_projections(components.transformer) as calls:
        pipeline.run(request(two_stage=True, **TEXT_ONLY))
    assert calls == once_a_block(2, 1)


def test_text_that_noise_modulates_is_projected_in_every_step() -> None:
    components = tiny_components("2.3")
    pipeline = ours(components)
    with rows_of_text_projections(components.transformer) as calls:
        pipeline.run(request("2.3", **NO_GUIDANCE))
    assert calls == {key: STEPS * count for key, count in once_a_block(1).items()}
    processors = {type(attn.processor) for attn in attentions(components.transformer)}
    assert processors == {LTX2PerturbedAttnProcessor}


def test_nothing_holds_keys_after_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []

    def noting(transformer: Any, text: Text) -> Text | TextKeys:
        keys = text_keys(transformer, text)
        assert isinstance(keys, TextKeys)
        made.extend(weakref.ref(part) for of in (keys.video, keys.audio) for part in (of.keys, of.values))
        return keys

    monkeypatch.setattr(denoising, "text_keys", noting)
    pipeline = ours(tiny_components())
    result = pipeline.run(request())
    assert len(made) == 2 * 4
    assert not any(reference() is not None for reference in made)
    assert result.frames.shape[0] == 1


class OwnProcessor(LTX2AudioVideoAttnProcessor):
    """Of a user: attends to nothing."""

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Tensor:
        return 0 * super().__call__(attn, *args, **kwargs)


def own_components() -> Components:
    components = tiny_components()
    return replace(components, transformer=copy.deepcopy(components.transformer))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_processors_of_a_user_see_the_text(before: bool) -> None:
    components = own_components()
    unlike = ours(components).run(request()).digests
    own = OwnProcessor()
    if before:
        components.transformer.transformer_blocks[1].attn2.set_processor(own)
    pipeline = ours(components)
    components.transformer.transformer_blocks[1].attn2.set_processor(own)
    result = pipeline.run(request())
    assert components.transformer.transformer_blocks[1].attn2.processor is own
    library = rebuilt(components.transformer)
    library.transformer_blocks[1].attn2.set_processor(own)
    expected = stock_around(replace(components, transformer=library), request())
    assert same_outputs(result, expected, components) == ALL_SAME
    assert result.digests != unlike


def test_new_weights_serve_the_next_request() -> None:
    components = own_components()
    pipeline = ours(components)
    before = pipeline.run(request()).digests
    for attn in attentions(components.transformer):
        attn.to_k.weight.mul_(1.5)
        attn.to_v.bias.add_(0.25)
    result = pipeline.run(request())
    assert same_outputs(result, stock(components, request()), components) == ALL_SAME
    assert result.digests != before


def attentions(transformer: Any) -> list[Any]:
    """The text attentions."""
    blocks = transformer.transformer_blocks
    return [attn for block in blocks for attn in (block.attn2, block.audio_attn2)]


def attention(processor: Any, *, gated: bool, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    attn = LTX2Attention(
        query_dim=12, heads=3, kv_heads=3, dim_head=4, cross_attention_dim=10, rope_type="split",
        apply_gated_attention=gated, processor=processor,
    )  # fmt: skip
    for norm in (attn.norm_q, attn.norm_k):  # initial weights of 1 would hide a swapped one
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return attn.to(dtype).eval()


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def accepting(attn: Any) -> Any:
    """The same attention, which takes keys and values."""
    block = torch.nn.Module()
    block.cross_attn_adaln, block.attn2, block.audio_attn2 = False, copy.deepcopy(attn), copy.deepcopy(attn)
    transformer = torch.nn.Module()
    transformer.transformer_blocks = torch.nn.ModuleList([block])
    accept_keys(transformer)
    assert isinstance(block.attn2.processor, TextAttnProcessor)
    return transformer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stock_processor", [LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor])
@torch.inference_mode()
def test_attention_to_keys_equals_attention_to_text(
    stock_processor: type, gated: bool, dtype: torch.dtype
) -> None:
    attn = attention(stock_processor(), gated=gated, dtype=dtype)
    tokens, text = drawn(ROWS, TOKENS, 12, dtype=dtype), drawn(ROWS, TEXT, 10, dtype=dtype)
    mask = torch.zeros(ROWS, 1, TEXT, dtype=dtype)
    mask[0, :, :3] = -10000
    expected = attn(tokens, encoder_hidden_states=text, attention_mask=mask)
    unmasked = attn(tokens, encoder_hidden_states=text)
    transformer = accepting(attn)
    keys = text_keys(transformer, Text(text, text, mask))
    for name in ("", "audio_"):
        module = getattr(transformer.transformer_blocks[0], f"{name}attn2")
        given = keys.of_block(0)[f"{name}encoder_hidden_states"]
        assert isinstance(given, KeysAndValues)
        assert torch.equal(module(tokens, encoder_hidden_states=given), expected)
        assert torch.equal(module(tokens, encoder_hidden_states=text, attention_mask=mask), expected)
    assert not torch.equal(expected, unmasked)


@pytest.mark.parametrize("stock_processor", [LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor])
@torch.inference_mode()
def test_other_attention_stays_as_it_was(stock_processor: type) -> None:
    attn = attention(stock_processor(), gated=False, dtype=torch.float32)
    tokens, context = (drawn(ROWS, TOKENS, width, dtype=torch.float32) for width in (12, 10))
    angles = drawn(ROWS, 3, TOKENS, 2, dtype=torch.float32)
    calls: list[dict[str, Any]] = [
        {},
        {"query_rotary_emb": (angles.cos(), angles.sin())},
        {"query_rotary_emb": (angles.cos(), angles.sin()), "key_rotary_emb": (angles.sin(), angles.cos())},
    ]
    if stock_processor is LTX2PerturbedAttnProcessor:
        blend = torch.tensor([0.0, 1.0]).view(2, 1, 1)
        calls += [{"all_perturbed": True}, {"perturbation_mask": blend, "all_perturbed": False}]
    module = accepting(attn).transformer_blocks[0].attn2
    results = [module(tokens, encoder_hidden_states=context, **call) for call in calls]
    for result, call in zip(results, calls, strict=True):
        assert torch.equal(result, attn(tokens, encoder_hidden_states=context, **call))
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)


def test_the_chosen_attention_backend_is_kept() -> None:
    attn = attention(LTX2AudioVideoAttnProcessor(), gated=False, dtype=torch.float32)
    attn.set_attention_backend("_native_math")
    module = accepting(attn).transformer_blocks[0].attn2
    assert module.processor._attention_backend == "_native_math"
