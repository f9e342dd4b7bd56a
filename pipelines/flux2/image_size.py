"""Heights and widths that FLUX.2 makes. Free of torch."""

from __future__ import annotations

from pipelines.grids import require_grid

VAE_SCALE = 8
"""Pixels of an image along one side of one latent."""
PATCH = 2
"""Latents along one side of one token."""
TOKEN_PIXELS = VAE_SCALE * PATCH

_LONGEST_SIDE = 8192


def require_image_size(height: int, width: int) -> None:
    """In pixels. Raises: ConfigError for one that can't be made, with the nearest that can."""
    for name, side in (("height", height), ("width", width)):
        require_grid(
            name,
            side,
            step=TOKEN_PIXELS,
            first=TOKEN_PIXELS,
            last=_LONGEST_SIDE,
            legal=f"a multiple of {TOKEN_PIXELS}",
        )
