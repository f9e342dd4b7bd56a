"""The transformer in parts has the bits of its forward."""

from __future__ import annotations

import pytest
import torch
from tiny_flux2 import make_components

from pipelines.flux2 import transformer_pass
from pipelines.flux2.position_ids import image_position_ids, text_position_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("variant", ["4b", "dev"])
@torch.no_grad()
def test_parts_equal_the_forward(variant: str, batch: int, dtype: torch.dtype) -> None:
    transformer = make_components(variant, dtype)[0].transformer
    generator = torch.Generator().manual_seed(batch)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator).to(dtype)

    tokens, prompt_embeds = draw(6 + 20, 16), draw(10, 96)
    timestep = torch.full([batch], 0.7371, dtype=dtype)
    guidance = torch.full([batch], 3.5) if variant == "dev" else None
    text_ids, image_ids = text_position_ids(10), image_position_ids((2, 3), [(5, 4)])

    expected = transformer(
        hidden_states=tokens,
        encoder_hidden_states=prompt_embeds,
        timestep=timestep,
        guidance=guidance,
        txt_ids=text_ids,
        img_ids=image_ids,
        return_dict=False,
    )[0]
    velocity = transformer_pass.predict(
        transformer,
        tokens,
        transformer_pass.embed_context(transformer, prompt_embeds),
        rope=transformer_pass.rope(transformer, text_ids, image_ids),
        modulations=transformer_pass.modulations(transformer, timestep, guidance),
    )

    assert torch.equal(velocity, expected)
    assert velocity.float().std() > 0.1


@torch.no_grad()
def test_timesteps_that_bf16_keeps_apart_make_other_modulations() -> None:
    """FLUX.2 rounds t / 1000 to the model dtype on purpose, as diffusers does (case C13)."""
    transformer = make_components("4b", torch.bfloat16)[0].transformer

    def modulated(time: float) -> torch.Tensor:
        timestep = torch.tensor([time], dtype=torch.bfloat16)
        return transformer_pass.modulations(transformer, timestep, None).image

    assert not torch.equal(modulated(0.75), modulated(0.76))
    assert torch.equal(modulated(0.9993986), modulated(0.9983897))
