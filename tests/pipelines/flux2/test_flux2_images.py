"""Reference images: what is taken, changed with a note, or refused (case C22)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image

from accel.errors import ConfigError
from pipelines.flux2.images import load_references, reference_from

COLOURS = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
PICTURE = Image.fromarray(COLOURS)
EXACT = torch.from_numpy(COLOURS).permute(2, 0, 1)[None] / 255 * 2 - 1


def load(image: Image.Image, folder: Path, suffix: str = "png", **options: object) -> torch.Tensor:
    file = folder / f"picture.{suffix}"
    image.save(file, **options)
    (reference,) = load_references([str(file)])
    return reference.pixels


def test_pixels_lie_in_minus_one_to_one(tmp_path: Path) -> None:
    pixels = load(PICTURE, tmp_path)
    assert pixels.dtype == torch.float32
    assert torch.allclose(pixels, EXACT, atol=1e-6)
    assert pixels.min() == -1
    assert pixels.max() == 1


def test_the_middle_is_cropped_to_multiples_of_16(tmp_path: Path) -> None:
    wide = Image.new("RGB", (86, 69))
    wide.paste(PICTURE, (3, 2))
    assert torch.allclose(load(wide, tmp_path), EXACT, atol=1e-6)


@pytest.mark.parametrize(("mode", "suffix"), [("L", "png"), ("LA", "png"), ("RGBA", "png"), ("CMYK", "tif")])
def test_other_modes_become_rgb(mode: str, suffix: str, tmp_path: Path) -> None:
    converted = PICTURE.convert(mode)
    want = np.asarray(converted.convert("RGB"))
    expected = torch.from_numpy(want.copy()).permute(2, 0, 1)[None] / 255 * 2 - 1
    assert torch.allclose(load(converted, tmp_path, suffix), expected, atol=1e-6)


def test_a_palette_becomes_its_colours(tmp_path: Path) -> None:
    flat = Image.new("RGB", (64, 64), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    pixels = load(flat, tmp_path)
    assert torch.allclose(pixels[0, :, 5, 5], torch.tensor([10.0, 200.0, 30.0]) / 127.5 - 1, atol=1e-6)


def test_an_image_is_turned_upright(tmp_path: Path) -> None:
    turned = PICTURE.transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[0x0112] = 6  # stored on its side
    assert torch.allclose(load(turned, tmp_path, exif=exif), EXACT, atol=1e-6)


def test_transparency_is_ignored_with_a_note(tmp_path: Path) -> None:
    see_through = PICTURE.convert("RGBA")
    see_through.putalpha(Image.linear_gradient("L").resize(see_through.size))
    see_through.save(tmp_path / "logo.png")
    (reference,) = load_references([str(tmp_path / "logo.png")])
    assert reference.notes == ("model.images[0]: its transparency is ignored.",)
    assert torch.allclose(reference.pixels, EXACT, atol=1e-6)


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "tif"])
def test_of_several_frames_the_first_is_used_with_a_note(suffix: str, tmp_path: Path) -> None:
    red, blue = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "blue")
    file = tmp_path / f"moving.{suffix}"
    red.save(file, save_all=True, append_images=[blue, red])
    (reference,) = load_references([str(file)])
    assert reference.notes == ("model.images[0]: has 3 frames; the first one is used.",)
    assert torch.allclose(reference.pixels[0, :, 5, 5], torch.tensor([1.0, -1.0, -1.0]), atol=0.05)


def test_large_images_are_scaled_down_with_a_note(tmp_path: Path) -> None:
    Image.new("RGB", (2048, 1024)).save(tmp_path / "large.png")
    (reference,) = load_references([str(tmp_path / "large.png")])
    assert reference.pixels.shape == (1, 3, 720, 1440)
    assert reference.grid == (45, 90)
    assert reference.notes == ("model.images[0]: scaled from 2048x1024 to 1448x724 pixels.",)


def test_scaling_and_cropping_are_those_of_diffusers() -> None:
    large = PICTURE.resize((1111, 1003))
    processor = Flux2ImageProcessor(vae_scale_factor=16)
    small = processor._resize_to_target_area(large, 1024 * 1024)  # as its pipelines call it
    height, width = small.height // 16 * 16, small.width // 16 * 16
    expected = processor.preprocess(small, height=height, width=width, resize_mode="crop")
    assert torch.equal(reference_from(large, name="image").pixels, expected)


@pytest.mark.parametrize(
    ("size", "mode", "message"),
    [
        ((63, 64), "RGB", "too small: 63"),
        ((1024, 64), "RGB", "Aspect ratio too extreme"),
        ((64, 64), "I;16", "save the image with 8 bits"),
        ((64, 64), "I", "save the image with 8 bits"),
    ],
)
def test_unusable_images_are_refused_by_name(
    size: tuple[int, int], mode: str, message: str, tmp_path: Path
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "good.png")
    Image.new(mode, size).save(tmp_path / "bad.tif")
    with pytest.raises(ConfigError, match=message) as refusal:
        load_references([str(tmp_path / "good.png"), str(tmp_path / "bad.tif")])
    assert "model.images[1]" in str(refusal.value)


def test_missing_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.images\[0\]: no file"):
        load_references([str(tmp_path / "none.png")])
    PICTURE.save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:2000])
    with pytest.raises(ConfigError, match=r"model\.images\[0\].*no readable image"):
        load_references([str(tmp_path / "cut.png")])
    os.mkfifo(tmp_path / "pipe.png")
    for other in (tmp_path, tmp_path / "pipe.png"):
        with pytest.raises(ConfigError, match=r"model\.images\[0\]: .* is no regular file"):
            load_references([str(other)])


def test_a_name_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is then no user's home."""
    monkeypatch.chdir(tmp_path)
    PICTURE.save("~draft.png")
    (reference,) = load_references(["~draft.png"])
    assert torch.allclose(reference.pixels, EXACT, atol=1e-6)
    with pytest.raises(ConfigError, match=r"no file ~other\.png"):
        load_references(["~other.png"])


def test_metadata_that_hide_how_the_picture_is_turned_are_refused(tmp_path: Path) -> None:
    for number, damaged in enumerate((b"no metadata", b"II*\0\x08")):
        path = tmp_path / f"{number}.png"
        PICTURE.save(path, exif=b"Exif\0\0" + damaged)
        with pytest.raises(ConfigError, match=r"\.png is no readable image \(the EXIF data .* are damaged"):
            load_references([str(path)])
