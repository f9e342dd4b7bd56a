"""What the code behind LTX-2's mounted forwards looks like, by minor version of diffusers."""

from accel.fusion.mounting import Fingerprint

KNOWN: dict[str, dict[str, Fingerprint]] = {
    "0.42": {
        "diffusers.models.autoencoders.autoencoder_kl_ltx2.LTX2VideoResnetBlock3d": Fingerprint(
            parameters=("inputs", "temb", "generator", "causal"),
            body="cde8302e87375484",
            init="431d765f62f0d5af",
        ),
        "diffusers.models.autoencoders.autoencoder_kl_ltx2.PerChannelRMSNorm": Fingerprint(
            parameters=("x", "channel_dim"), body="b013e7d05857d89b", init="10aeb4e9a023a970"
        ),
        "diffusers.models.normalization.RMSNorm": Fingerprint(
            parameters=("hidden_states",), body="ab9075d036873ac9", init="45e9c6582d4f5abf"
        ),
        "diffusers.models.transformers.transformer_ltx2.LTX2Attention": Fingerprint(
            parameters=(
                "hidden_states",
                "encoder_hidden_states",
                "attention_mask",
                "query_rotary_emb",
                "key_rotary_emb",
                "kwargs",
            ),
            body="defe2a9bb6a171cf",
            init="c95c4f6a626a6a08",
        ),
        "diffusers.models.transformers.transformer_ltx2.LTX2AudioVideoAttnProcessor": Fingerprint(
            parameters=(
                "attn",
                "hidden_states",
                "encoder_hidden_states",
                "attention_mask",
                "query_rotary_emb",
                "key_rotary_emb",
            ),
            body="0391667b7f0a45ae",
            init="b1dcc93003d199b6",
        ),
        "diffusers.models.transformers.transformer_ltx2.LTX2PerturbedAttnProcessor": Fingerprint(
            parameters=(
                "attn",
                "hidden_states",
                "encoder_hidden_states",
                "attention_mask",
                "query_rotary_emb",
                "key_rotary_emb",
                "perturbation_mask",
                "all_perturbed",
            ),
            body="ab3b88fd4d262072",
            init="b1dcc93003d199b6",
        ),
        "diffusers.models.transformers.transformer_ltx2.LTX2VideoTransformerBlock": Fingerprint(
            parameters=(
                "hidden_states",
                "audio_hidden_states",
                "encoder_hidden_states",
                "audio_encoder_hidden_states",
                "temb",
                "temb_audio",
                "temb_ca_scale_shift",
                "temb_ca_audio_scale_shift",
                "temb_ca_gate",
                "temb_ca_audio_gate",
                "temb_prompt",
                "temb_prompt_audio",
                "video_rotary_emb",
                "audio_rotary_emb",
                "ca_video_rotary_emb",
                "ca_audio_rotary_emb",
                "encoder_attention_mask",
                "audio_encoder_attention_mask",
                "self_attention_mask",
                "audio_self_attention_mask",
                "a2v_cross_attention_mask",
                "v2a_cross_attention_mask",
                "use_a2v_cross_attention",
                "use_v2a_cross_attention",
                "perturbation_mask",
                "all_perturbed",
            ),
            body="1dbdd9ab731b53b9",
            init="519254ecdc148bd4",
        ),
        "diffusers.models.transformers.transformer_ltx2.apply_split_rotary_emb": Fingerprint(
            parameters=("x", "freqs"), body="101de9c72dfea98a", init=""
        ),
    }
}
