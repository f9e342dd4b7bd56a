"""The names that `accel.fused` may switch, free of torch so that configuration checks stay fast."""

# Fusion sites, whose kernels have the bits of eager.
SITE_NAMES = (
    "modulate",
    "gated_residual",
    "layer_norm_modulate",
    "residual_layer_norm_modulate",
    "rms_norm_modulate",
    "residual_rms_norm_modulate",
    "qk_norm_rope",
    "joint_qk_norm_rope",
    "qk_norm_split_rope",
    "swiglu",
    "swiglu_concat",
    "quantize_rows",
    "swiglu_quantize_rows",
    "guided_euler_step",
    "group_norm_silu",
    "channel_norm_silu",
)

# Passes of a network left out or run together: the same mathematics, but roundings move.
SAVING_NAMES = (
    "batched_guidance",
    "skip_unused_guidance",
    "skip_ineffective_stg",
)

FUSED_NAMES = SITE_NAMES + SAVING_NAMES
