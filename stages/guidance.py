"""Classifier-free guidance (FLUX 3 Action spec section 10.3)."""

from __future__ import annotations

from torch import Tensor


def combine(uncond: Tensor, cond: Tensor, scale: float) -> Tensor:
    """Guided velocity `uncond + scale * (cond - uncond)`.

    uncond, cond: same shape, in the model's output dtype; every operation rounds to that dtype.
    At scale 1 the result may differ from `cond` by rounding.
    """
    return uncond + scale * (cond - uncond)


def resolve_guidance(
    package_video: float,
    package_action: float | None,
    request_video: float | None,
    request_action: float | None,
) -> tuple[float, float]:
    """Guidance scales (video, action) of one request; `None` means "not set".

    A request goes before the package. An action scale that neither sets follows the video scale,
    the request's own if there is one.
    """
    video = package_video if request_video is None else request_video
    action = package_action if request_action is None else request_action
    return video, video if action is None else action


def passes(*scales: float) -> int:
    """Network passes per step: one when every scale is exactly 1, else two (empty caption and caption)."""
    return 1 if all(scale == 1.0 for scale in scales) else 2
