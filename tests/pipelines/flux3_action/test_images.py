"""Camera images in every dtype, range, layout and file kind (cases C22 and C23)."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from accel.errors import ConfigError, ObservationError
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.flux3_action.images import RANGE_SLACK, open_image, to_unit_image

CASES = Path(__file__).parents[2] / "cases"
RANGES = CASES / "C22_images"
ORDERS = CASES / "C23_images"


def unit(value, **declared) -> Tensor:
    return to_unit_image(value, camera="wrist", image_format=ImageFormat(**declared))


def eight_bit(image: Tensor) -> Tensor:
    """(3, H, W) in 0..1 -> (H, W, 3), rounded to 0..255."""
    return (image * 255).round().to(torch.uint8).permute(1, 2, 0)


def file(name: str) -> Tensor:
    return unit(open_image(ORDERS / name, camera="wrist"))


TRUE_PICTURE = np.load(RANGES / "uint8.npy")


# C22: values and ranges


def test_c22_uint8_is_divided_by_255_in_float32():
    image = unit(TRUE_PICTURE)
    assert image.dtype == torch.float32
    assert image.is_contiguous()
    assert torch.equal(image, torch.from_numpy(TRUE_PICTURE).permute(2, 0, 1).float() / 255)


EVERY_BYTE = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2) + np.arange(
    3, dtype=np.uint8
)


@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize("order", ["rgb", "bgr", "rgba", "bgra"])
@pytest.mark.parametrize("value_range", ["auto", (0, 255), (-5, 260)])
def test_c22_every_byte_in_every_declared_form_is_divided_to_the_bit(layout, order, value_range):
    """The picture is what torch's own arithmetic makes of it, whatever carries it."""
    low, high = (0, 255) if value_range == "auto" else value_range
    expected = (torch.from_numpy(EVERY_BYTE).permute(2, 0, 1).float() - low) / (high - low)
    image = EVERY_BYTE[..., ::-1] if order.startswith("bgr") else EVERY_BYTE
    if len(order) == 4:
        image = np.concatenate([image, EVERY_BYTE[..., :1]], axis=2)
    if layout == "chw":
        image = image.transpose(2, 0, 1)
    for carrier in (image, np.asfortranarray(image), image.astype(np.int64), image.astype(">u2")):
        seen = unit(carrier, layout=layout, order=order, value_range=value_range)
        assert seen.is_contiguous()
        assert torch.equal(seen, expected)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", ">f8", "<f2", "<u2", ">u2", "<i8"])
@pytest.mark.parametrize("value_range", [(0, 1), (-1, 1), (0, 255), (-0.3, 90.7), (0, 65535)])
def test_c22_other_numbers_are_scaled_as_torch_scales_them(dtype, value_range):
    low, high = value_range
    slack = RANGE_SLACK * 0.9 * (high - low) if np.dtype(dtype).kind == "f" else 0
    numbers = np.random.default_rng(0).uniform(low - slack, high + slack, (37, 53, 3))
    image = (numbers if slack else np.trunc(numbers)).clip(None, 65500).astype(dtype)  # float16 ends there
    tensor = torch.from_numpy(image.astype(image.dtype.newbyteorder("="))).permute(2, 0, 1).float()
    expected = ((tensor - low) / (high - low)).clamp(0, 1)
    assert torch.equal(unit(image, value_range=value_range), expected)


@pytest.mark.parametrize("name", ["float32_0_1", "float64_0_1", "int64"])
def test_c22_same_picture_in_the_range_of_its_dtype(name):
    torch.testing.assert_close(unit(np.load(RANGES / f"{name}.npy")), unit(TRUE_PICTURE), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("float32_0_255", (0, 255)),
        ("float64_0_255", (0, 255)),
        ("float32_minus1_1", (-1, 1)),
        ("uint16_0_65535", (0, 65535)),
    ],
)
def test_c22_other_ranges_only_if_declared(name, declared):
    array = np.load(RANGES / f"{name}.npy")
    with pytest.raises(ObservationError, match=rf"'wrist'.*{array.min()} to {array.max()}.*value_range"):
        unit(array)
    torch.testing.assert_close(unit(array, value_range=declared), unit(TRUE_PICTURE), atol=1e-6, rtol=0)


def test_c22_overshoot_is_clipped_not_wrapped():
    image = eight_bit(unit(np.load(RANGES / "float32_slightly_outside.npy")))
    assert image[0, 0, :2].tolist() == [255, 0]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)])
def test_c22_floats_are_clipped_up_to_four_eight_bit_steps(low, high):
    step = (high - low) / 255
    image = np.full((2, 2, 3), low, np.float64)
    for excess, taken in ((3.9, True), (4.1, False)):
        for value in (low - excess * step, high + excess * step):
            image[0, 0] = value
            if taken:
                assert unit(image, value_range=(low, high))[:, 0, 0].tolist() == [float(value > low)] * 3
            else:
                with pytest.raises(ObservationError, match="lie outside"):
                    unit(image, value_range=(low, high))


@pytest.mark.parametrize("value_range", [(0, 0), (1, -1), (0, float("nan")), (float("-inf"), 0)])
def test_c22_a_range_without_values_is_refused(value_range):
    with pytest.raises(ConfigError, match="value_range"):
        ImageFormat(value_range=value_range)


def test_c22_nan_names_the_camera():
    with pytest.raises(ObservationError, match=r"'wrist'.*NaN"):
        unit(np.load(RANGES / "float32_nan.npy"))


def test_c22_bool_is_refused():
    with pytest.raises(ObservationError, match=r"'wrist'.*bool with values False to True"):
        unit(np.load(RANGES / "bool.npy"))


def test_c22_dark_floats_are_not_guessed():
    dark = np.load(RANGES / "float32_dark_0_255_ambiguous.npy")
    assert torch.equal(unit(dark), torch.from_numpy(dark).permute(2, 0, 1))


@pytest.mark.parametrize("array", [np.full((2, 2, 3), 300), np.full((2, 2, 3), -1, np.int16)])
def test_integers_are_never_clipped(array):
    with pytest.raises(ObservationError, match=f"{array.min()} to {array.max()}"):
        unit(array)


# C23: channels, layout, strides


def assert_true_colours(image: Tensor) -> None:
    pixels = eight_bit(image)
    assert pixels.shape == (4, 6, 3)
    assert pixels[0, 0].tolist() == [1, 2, 3]
    assert pixels[1, 1].tolist() == [200, 100, 10]


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("rgb", {}),
        ("fortran_order", {}),
        ("big_endian_float32", {}),
        ("rgba", {"order": "rgba"}),
        ("bgr", {"order": "bgr"}),
        ("bgra", {"order": "bgra"}),
        ("chw", {"layout": "chw"}),
    ],
)
def test_c23_declared_colour_and_layout(name, declared):
    assert_true_colours(unit(np.load(ORDERS / f"{name}.npy"), **declared))


@pytest.mark.parametrize(
    "view",
    [
        lambda rgb, bgr: rgb[::-1],
        lambda rgb, bgr: rgb[:, ::-1],
        lambda rgb, bgr: bgr[..., ::-1],
        lambda rgb, bgr: rgb[None][::-1][0],
        lambda rgb, bgr: rgb[:1][::-1],
        lambda rgb, bgr: rgb[::2, ::2],
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_c23_views_equal_their_copies(view, dtype):
    scale = 1 if dtype is np.uint8 else 255
    rgb, bgr = ((np.load(ORDERS / f"{name}.npy") / scale).astype(dtype) for name in ("rgb", "bgr"))
    array = view(rgb, bgr)
    assert torch.equal(unit(array), unit(array.copy()))


@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_c23_read_only_array_is_taken_without_a_warning_and_never_written_to(dtype, layout):
    array = (np.load(ORDERS / "rgb.npy") / (1 if dtype is np.uint8 else 255)).astype(dtype)
    array = np.ascontiguousarray(array.transpose(2, 0, 1)) if layout == "chw" else array
    before = array.copy()
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = unit(array, layout=layout)
    assert_true_colours(image)
    image.zero_()
    assert np.array_equal(array, before)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gray_hw", r"shape \(4, 6\).*gray"),
        ("gray_hw1", r"shape \(4, 6, 1\).*gray"),
        ("two_channels", r"shape \(4, 6, 2\)"),
        ("batched_1hwc", r"shape \(1, 4, 6, 3\).*batch"),
        ("chw", r"shape \(3, 4, 6\).*layout"),
        ("rgba", r"shape \(4, 6, 4\).*rgba or bgra"),
    ],
)
def test_c23_undeclared_layouts_are_refused_with_their_shape(name, message):
    with pytest.raises(ObservationError, match=message):
        unit(np.load(ORDERS / f"{name}.npy"))


@pytest.mark.parametrize(
    "value",
    [
        "a.png",
        {"pixels": 1},
        None,
        [[1, 2], [3]],
        [[[0, 1, 2]], [[0, 1]]],
        [torch.zeros(2, 3), torch.zeros(1, 3)],
        [[torch.zeros(3, requires_grad=True)]],
        np.zeros((0, 4, 3), np.uint8),
        torch.zeros(3, 4, 6, dtype=torch.float8_e4m3fn),
        torch.zeros(3, 4, 6, dtype=torch.complex64),
        torch.zeros(3, 4, 6).to_sparse(),
        torch.zeros(3, 4, 6, device="meta"),
    ],
)
def test_what_is_no_image_is_refused(value):
    with pytest.raises(ObservationError, match="camera 'wrist'"):
        unit(value)


def test_an_image_without_pixels_is_told_so():
    with pytest.raises(ObservationError, match=r"\(0, 4, 3\).*has pixels"):
        unit(np.zeros((0, 4, 3), np.uint8))


def test_lists_and_tensors():
    rgb = np.load(ORDERS / "rgb.npy")
    expected = unit(rgb)
    assert torch.equal(unit(rgb.tolist()), expected)
    assert torch.equal(unit(torch.from_numpy(rgb)), expected)
    assert torch.equal(unit(expected), expected)  # float tensors are CHW
    assert torch.equal(unit(expected.clone().requires_grad_()), expected)
    assert torch.equal(unit(expected.permute(1, 2, 0), layout="hwc"), expected)
    torch.testing.assert_close(unit(expected.bfloat16()), expected, atol=4e-3, rtol=0)
    with pytest.raises(ObservationError, match="layout"):
        unit(expected.permute(1, 2, 0))


# C23: image files


def test_c23_exif_orientation_is_applied():
    assert file("exif_orientation_6.jpg").shape == (3, 48, 32)


@pytest.mark.parametrize("name", ["rgba_alpha0.png", "palette.png"])
def test_c23_colours_of_files(name):
    """Alpha is dropped, not blended, even where it is 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_true_colours(file(name))


def test_c23_cmyk_is_converted():
    pixels = eight_bit(file("cmyk.jpg")).int()
    assert (pixels[1, 1] - torch.tensor([200, 100, 10])).abs().max() <= 8


def test_c23_sixteen_bits_are_not_cut_to_the_low_byte():
    image = file("gray16.png")
    assert image[:, 0, 0].tolist() == [pytest.approx(514 / 65535)] * 3
    assert image[:, 1, 1].tolist() == [pytest.approx(25700 / 65535)] * 3


@pytest.mark.parametrize("mode", ["I", "F"])
def test_files_whose_range_nothing_declares_are_refused(mode):
    """Eight-bit values in 32 bits would become nearly black."""
    with pytest.raises(ObservationError, match=r"'wrist'.*no declared range"):
        unit(Image.new(mode, (6, 4), 200))


def test_files_keep_their_own_order_whatever_is_declared_for_arrays():
    image = open_image(ORDERS / "rgba_alpha0.png", camera="wrist")
    assert_true_colours(unit(image, order="bgr", layout="chw", value_range=(-1, 1)))


def test_unreadable_files_name_the_camera(tmp_path):
    with pytest.raises(ObservationError, match="'wrist': no file"):
        open_image(tmp_path / "absent.png", camera="wrist")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ObservationError, match=r"'wrist'.*no readable image"):
        open_image(tmp_path / "text.png", camera="wrist")
    whole = (ORDERS / "exif_orientation_6.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ObservationError, match=r"'wrist'.*no readable image"):
        open_image(tmp_path / "cut.jpg", camera="wrist")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ObservationError, match=r"'wrist': .*pipe\.png is no regular file"):
        open_image(tmp_path / "pipe.png", camera="wrist")


def test_metadata_that_hide_how_the_image_is_turned_name_the_camera(tmp_path):
    damaged = tmp_path / "damaged.png"
    Image.fromarray(TRUE_PICTURE).save(damaged, exif=b"Exif\0\0no metadata")
    with pytest.raises(ObservationError, match=r"'wrist': .*damaged\.png .*the EXIF data of the image are"):
        open_image(damaged, camera="wrist")
    with Image.open(damaged) as image, pytest.raises(ObservationError, match="'wrist': the EXIF data"):
        unit(image)
