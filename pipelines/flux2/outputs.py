"""The files that images become: image.png, or image_0.png and so on."""

from __future__ import annotations

from pipelines.flux2.request import ImageResult
from pipelines.pixel_files import eight_bit, png, require_finite


def image_files(result: ImageResult, *, model: str, config_hash: str, note: str) -> dict[str, bytes]:
    """File name -> PNG, all of them encoded before any is written.

    model, config_hash: of the run, written into every file beside prompt and seed. note: what a reader of the
    images must know, or empty.
    Raises: OutputError naming the first image with values that are not finite.
    """
    count = len(result.images)
    names = ["image.png"] if count == 1 else [f"image_{index}.png" for index in range(count)]
    text = {
        "Software": "samebit",
        "prompt": result.prompt,
        "seed": str(result.seed),
        "model": model,
        "config_hash": config_hash,
    } | ({"Comment": note} if note else {})
    images = dict(zip(names, result.images, strict=True))
    for name, image in images.items():
        require_finite(name, image)
    return {name: png(eight_bit(image), metadata=text) for name, image in images.items()}
