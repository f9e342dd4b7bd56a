"""Camera images -> the one canvas that the policy looks at (spec section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.errors import ConfigError, ObservationError
from pipelines.flux3_action.policy_config import PolicyConfig

Size = tuple[int, int]
"""(height, width) in pixels."""

COMPOSITE = "composite"
"""Camera name of an already composed `droid` picture."""
DROID_CAMERA: Size = (360, 640)
DROID_COMPOSITE: Size = (540, 640)


def compose_canvas(images: Mapping[str, Tensor], config: PolicyConfig) -> Tensor:
    """Arrange the cameras as `config.camera_layout` says.

    images: camera name -> float32 (3, H, W) in [0, 1], on the CPU; holds `config.cameras`, or
        `composite` in their place for the droid layout.
    Returns float32 (3, Hc, Wc) in [-1, 1].
    Raises: ObservationError for a missing camera or a wrong size; ConfigError for a layout that
        does not fit its cameras or canvas.
    """
    layout = config.camera_layout
    if layout not in _LAYOUTS:
        raise ConfigError(f"camera_layout: unknown layout '{layout}'. Known: {', '.join(_LAYOUTS)}.")
    canvas = torch.empty(3, *config.canvas_hw, dtype=torch.float32, device="cpu")
    if COMPOSITE in images:
        if layout != "droid":
            raise ObservationError(
                f"camera '{COMPOSITE}' belongs to the droid layout; this policy's layout is '{layout}'"
            )
        _require_size(COMPOSITE, images[COMPOSITE], DROID_COMPOSITE)
        _composite_of(canvas).copy_(images[COMPOSITE])
        _mirror_margin(canvas)
    else:
        _LAYOUTS[layout](_named(images, config.cameras), canvas)
    # The bits of `canvas * 2 - 1` in one pass: doubling is exact, so that both round once.
    return torch.add(canvas.new_tensor(-1.0), canvas, alpha=2, out=canvas)


def _named(images: Mapping[str, Tensor], cameras: Sequence[str]) -> dict[str, Tensor]:
    """The cameras in layout order."""
    missing = [camera for camera in cameras if camera not in images]
    if missing:
        raise ObservationError(
            f"no image from camera {', '.join(missing)}; got {', '.join(images) or 'no images'}"
        )
    return {camera: images[camera] for camera in cameras}


def _droid(views: Mapping[str, Tensor], canvas: Tensor) -> None:
    """Wrist above left and right at half size."""
    _require_cameras("droid", views, 3)
    for camera, view in views.items():
        _require_size(camera, view, DROID_CAMERA)
    wrist, left, right = views.values()
    height, width = DROID_CAMERA
    composite = _composite_of(canvas)
    composite[:, :height] = wrist
    composite[:, height:, : width // 2] = _half(left)
    composite[:, height:, width // 2 :] = _half(right)
    _mirror_margin(canvas)


def _composite_of(canvas: Tensor) -> Tensor:
    """The part of a `droid` canvas that is not margin."""
    height, width = DROID_COMPOSITE
    return canvas[:, :height, :width]


def _mirror_margin(canvas: Tensor) -> None:
    """Mirror the composite into the margin on the right and at the bottom, without repeating its edge."""
    height, width = DROID_COMPOSITE
    bottom, right = canvas.shape[1] - height, canvas.shape[2] - width
    canvas[:, :height, width:] = canvas[:, :height, width - 1 - right : width - 1].flip(2)
    canvas[:, height:] = canvas[:, height - 1 - bottom : height - 1].flip(1)


def _single(views: Mapping[str, Tensor], canvas: Tensor) -> None:
    _require_cameras("single", views, 1)
    (view,) = views.values()
    canvas.copy_(_resize(view, _size(canvas)))


def _side_by_side(views: Mapping[str, Tensor], canvas: Tensor) -> None:
    _require_cameras("side_by_side", views, 2)
    if canvas.shape[2] % 2:
        raise ConfigError(f"canvas_hw: side_by_side needs an even width, not {canvas.shape[2]}")
    for half, view in zip(canvas.chunk(2, dim=2), views.values(), strict=True):
        half.copy_(_resize(view, _size(half)))


def _grid(views: Mapping[str, Tensor], canvas: Tensor) -> None:
    """Row-major cells, as square a grid as fits; unused area is 0."""
    canvas.zero_()
    largest = (max(v.shape[1] for v in views.values()), max(v.shape[2] for v in views.values()))
    columns = math.ceil(math.sqrt(len(views)))
    rows = math.ceil(len(views) / columns)
    height, width = canvas.shape[1] // rows, canvas.shape[2] // columns
    for index, view in enumerate(views.values()):
        top, left = index // columns * height, index % columns * width
        cell = _resize(_resize(view, largest), (height, width))
        canvas[:, top : top + height, left : left + width] = cell


def _half(image: Tensor) -> Tensor:
    """Half as high and wide: bilinear, corners not aligned, not antialiased.

    That is the mean of 2 x 2 pixels. Torch adds them in one order with one thread and in another with more,
    so `F.interpolate` rounds differently on different machines; this is the order of more threads, anywhere.
    """
    pairs = image[..., ::2] + image[..., 1::2]
    return (pairs[:, ::2] + pairs[:, 1::2]).mul_(0.25)


def _resize(image: Tensor, size: Size) -> Tensor:
    """Bilinear, corners not aligned, antialiased. An image of that size already comes back unchanged."""
    if _size(image) == size:
        return image
    return F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0]


def _size(image: Tensor) -> Size:
    return image.shape[1], image.shape[2]


def _require_cameras(layout: str, views: Mapping[str, Tensor], count: int) -> None:
    if len(views) != count:
        raise ConfigError(
            f"camera_keys: the {layout} layout takes {count} camera(s), not {len(views)} ({', '.join(views)})"
        )


def _require_size(camera: str, image: Tensor, size: Size) -> None:
    seen = _size(image)
    if seen != size:
        raise ObservationError(
            f"camera '{camera}': {seen[0]} x {seen[1]} pixels (height x width); "
            f"the droid layout takes {size[0]} x {size[1]}"
        )


# Each fills a canvas all over, in [0, 1].
_LAYOUTS: dict[str, Callable[[Mapping[str, Tensor], Tensor], None]] = {
    "droid": _droid,
    "single": _single,
    "side_by_side": _side_by_side,
    "grid": _grid,
}
