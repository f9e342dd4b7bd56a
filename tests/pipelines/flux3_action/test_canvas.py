"""Camera layouts against recorded canvases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accel.errors import ConfigError, ObservationError
from pipelines.flux3_action.canvas import compose_canvas
from pipelines.flux3_action.image_format import ImageFormat
from pipelines.flux3_action.images import to_unit_image
from pipelines.flux3_action.policy_config import PolicyConfig
from pipelines.flux3_action.synthetic import droid_config

DROID = droid_config("full")


def layout(name: str, cameras: str, canvas_hw: tuple[int, int]) -> PolicyConfig:
    return replace(DROID, camera_layout=name, camera_keys=tuple(cameras.split()), canvas_hw=canvas_hw)


def synthetic(height: int, width: int, s: int) -> Tensor:
    """The recorded cases' camera picture, uint8 HWC."""
    y = torch.arange(height)[:, None, None]
    x = torch.arange(width)[None, :, None]
    c = torch.arange(3)
    pixels = (7 * y * y + 13 * x + (3 + s) * x * y + 71 * c + 37 * s + (x * x) // (5 + s)) % 256
    return pixels.to(torch.uint8)


def unit(image: Tensor) -> Tensor:
    return to_unit_image(image, camera="test", image_format=ImageFormat())


def droid_views() -> dict[str, Tensor]:
    return {name: unit(synthetic(360, 640, s)) for s, name in enumerate(("wrist", "left", "right"))}


def test_droid(golden, golden_case):
    case = golden_case("canvas_droid")
    recorded = golden(case["file"])
    canvas = compose_canvas(droid_views(), DROID)
    assert canvas.shape == (3, 544, 736)
    blocks = canvas.unflatten(2, (46, 16)).unflatten(1, (34, 16)).mean((2, 4))
    assert torch.equal(canvas[:, case["indices"]["rows"]], recorded["droid.rows"])
    assert torch.equal(canvas[:, :, case["indices"]["cols"]], recorded["droid.cols"])
    torch.testing.assert_close(blocks, recorded["droid.mean_16x16"], **case["tol"])


@pytest.mark.parametrize("name", ["single", "single_up", "side_by_side", "grid3", "grid5_mixed", "grid1"])
def test_resized_layouts(golden, golden_case, name):
    case = golden_case(f"canvas_{name}")
    recorded = golden(case["file"])
    config = layout(
        case["config"]["camera_layout"],
        " ".join(case["config"]["camera_keys"]),
        tuple(case["config"]["canvas_hw"]),
    )
    images = {camera: unit(recorded[tensor]) for camera, tensor in case["inputs"].items()}
    canvas = compose_canvas(images, config)
    torch.testing.assert_close(canvas, recorded[case["outputs"]["canvas"]], **case["tol"])


def test_droid_is_bilinear_to_the_bit_and_the_same_on_any_number_of_threads():
    """Torch's own half size, with as many threads as make it add in the order of most machines."""
    views = droid_views() | {"right": torch.rand(3, 360, 640, generator=torch.Generator().manual_seed(0))}
    before, canvases = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            canvases.append(compose_canvas(views, DROID))
        halves = [
            functional.interpolate(views[camera][None], (180, 320), mode="bilinear", align_corners=False)[0]
            for camera in ("left", "right")
        ]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*canvases)
    assert torch.equal(canvases[0][:, 360:540, :640], torch.cat(halves, dim=2) * 2 - 1)


def test_the_observation_is_left_as_it_was():
    """Also where an image is the canvas already."""
    image = torch.rand(3, 64, 64)
    before = image.clone()
    compose_canvas({"a": image}, layout("single", "images.a", (64, 64)))
    assert torch.equal(image, before)


def test_mirrored_margin_does_not_repeat_the_edge():
    canvas = compose_canvas(droid_views(), DROID)
    assert torch.equal(canvas[:, :, 640], canvas[:, :, 638])
    assert torch.equal(canvas[:, 540], canvas[:, 538])
    assert torch.equal(canvas[:, 543, 735], canvas[:, 535, 543])


def test_composite_is_only_padded():
    composite = torch.rand(3, 540, 640, generator=torch.Generator().manual_seed(0))
    padded = functional.pad(composite[None], (0, 96, 0, 4), mode="reflect")[0]
    assert torch.equal(compose_canvas({"composite": composite}, DROID), padded * 2 - 1)


def test_c22_unused_area_is_exactly_minus_one():
    """Black of the model: padding is not mapped twice."""
    config = layout("grid", "a b c", (64, 64))
    canvas = compose_canvas({name: torch.ones(3, 30, 50) for name in "abc"}, config)
    assert torch.equal(canvas[:, 32:, 32:], torch.full((3, 32, 32), -1.0))
    torch.testing.assert_close(canvas[:, :32], torch.ones(3, 32, 64))


def test_wrong_size_names_the_camera():
    views = droid_views() | {"left": torch.zeros(3, 180, 320)}
    with pytest.raises(ObservationError, match=r"'left'.*180 x 320.*360 x 640"):
        compose_canvas(views, DROID)
    with pytest.raises(ObservationError, match=r"'composite'.*540 x 640"):
        compose_canvas({"composite": torch.zeros(3, 360, 640)}, DROID)


def test_missing_camera_is_named():
    with pytest.raises(ObservationError, match="no image from camera left, right; got wrist"):
        compose_canvas({"wrist": torch.zeros(3, 360, 640)}, DROID)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (layout("triptych", "images.a", (64, 64)), "unknown layout 'triptych'"),
        (layout("single", "images.a images.b", (64, 64)), "takes 1 camera"),
        (layout("side_by_side", "images.a", (64, 64)), "takes 2 camera"),
        (layout("droid", "images.a images.b", (544, 736)), "takes 3 camera"),
        (layout("side_by_side", "images.a images.b", (64, 33)), "even width"),
    ],
)
def test_layout_that_does_not_fit(config, message):
    with pytest.raises(ConfigError, match=message):
        compose_canvas({"a": torch.zeros(3, 8, 8), "b": torch.zeros(3, 8, 8)}, config)
