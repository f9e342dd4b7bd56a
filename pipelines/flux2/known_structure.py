"""What the code behind FLUX.2's mounted forwards looks like, by minor version of diffusers."""

from accel.fusion.mounting import Fingerprint

KNOWN: dict[str, dict[str, Fingerprint]] = {
    "0.42": {
        "diffusers.models.embeddings.apply_rotary_emb": Fingerprint(
            parameters=("x", "freqs_cis", "use_real", "use_real_unbind_dim", "sequence_dim"),
            body="a25267d425f8c5ea",
            init="",
        ),
        "diffusers.models.resnet.ResnetBlock2D": Fingerprint(
            parameters=("input_tensor", "temb", "args", "kwargs"),
            body="e3f38e1722955caf",
            init="f4005c3ada8a17b9",
        ),
        "diffusers.models.transformers.transformer_flux2.Flux2Attention": Fingerprint(
            parameters=(
                "hidden_states",
                "encoder_hidden_states",
                "attention_mask",
                "image_rotary_emb",
                "kwargs",
            ),
            body="37e221a40f31647f",
            init="c7a746531f9668dc",
        ),
        "diffusers.models.transformers.transformer_flux2.Flux2AttnProcessor": Fingerprint(
            parameters=(
                "attn",
                "hidden_states",
                "encoder_hidden_states",
                "attention_mask",
                "image_rotary_emb",
            ),
            body="2106c36979e28f30",
            init="9570321598734e76",
        ),
        "diffusers.models.transformers.transformer_flux2.Flux2FeedForward": Fingerprint(
            parameters=("x",), body="af59d2fda364f00c", init="750ad5b6fe3941af"
        ),
        "diffusers.models.transformers.transformer_flux2.Flux2ParallelSelfAttention": Fingerprint(
            parameters=("hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
            body="b20211042c998a04",
            init="828140f99da17e5a",
        ),
        "diffusers.models.transformers.transformer_flux2.Flux2ParallelSelfAttnProcessor": Fingerprint(
            parameters=("attn", "hidden_states", "attention_mask", "image_rotary_emb"),
            body="18a20dca47451835",
            init="9570321598734e76",
        ),
        "diffusers.models.transformers.transformer_flux2.Flux2SingleTransformerBlock": Fingerprint(
            parameters=(
                "hidden_states",
                "encoder_hidden_states",
                "temb_mod",
                "image_rotary_emb",
                "joint_attention_kwargs",
                "split_hidden_states",
                "text_seq_len",
            ),
            body="e1baa440356a9b3a",
            init="26985687ff58b7a6",
        ),
        "diffusers.models.transformers.transformer_flux2.Flux2SwiGLU": Fingerprint(
            parameters=("x",), body="0caf2addea5d5fce", init="52b449aa926444a6"
        ),
        "diffusers.models.transformers.transformer_flux2.Flux2TransformerBlock": Fingerprint(
            parameters=(
                "hidden_states",
                "encoder_hidden_states",
                "temb_mod_img",
                "temb_mod_txt",
                "image_rotary_emb",
                "joint_attention_kwargs",
            ),
            body="b5d26783a67cbd6d",
            init="59469b1d479e8146",
        ),
    }
}
