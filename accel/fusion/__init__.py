"""Fused kernels with the same bits as eager: call a site, and a gate decides what runs."""

from accel.fusion.sites import gated_residual, modulate, qk_norm_rope, swiglu

__all__ = ["gated_residual", "modulate", "qk_norm_rope", "swiglu"]
