"""Fused kernels with the same bits as eager: call a site, and a gate decides what runs."""

from accel.fusion.sites import (
    channel_norm_silu,
    gated_residual,
    group_norm_silu,
    guided_euler_step,
    joint_qk_norm_rope,
    layer_norm_modulate,
    modulate,
    qk_norm_rope,
    qk_norm_split_rope,
    quantize_rows,
    residual_layer_norm_modulate,
    residual_rms_norm_modulate,
    rms_norm_modulate,
    swiglu,
    swiglu_concat,
    swiglu_quantize_rows,
)

__all__ = [
    "channel_norm_silu",
    "gated_residual",
    "group_norm_silu",
    "guided_euler_step",
    "joint_qk_norm_rope",
    "layer_norm_modulate",
    "modulate",
    "qk_norm_rope",
    "qk_norm_split_rope",
    "quantize_rows",
    "residual_layer_norm_modulate",
    "residual_rms_norm_modulate",
    "rms_norm_modulate",
    "swiglu",
    "swiglu_concat",
    "swiglu_quantize_rows",
]
