"""Which components make one LTX-2 pipeline: rules checked before memory is taken for weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from accel.errors import CheckpointError
from pipelines.ltx2.defaults import DISTILLED_SIGMAS
from pipelines.ltx2.schedule import moves

# Numbers that requests divide by or take as 1: (component, key).
_ABOVE_ZERO = (
    ("transformer", "rope_theta"),
    ("transformer", "base_height"),
    ("transformer", "base_width"),
    ("transformer", "pos_embed_max_pos"),
    ("transformer", "audio_pos_embed_max_pos"),
    ("transformer", "audio_sampling_rate"),
    ("transformer", "timestep_scale_multiplier"),
    ("connectors", "rope_theta"),
    ("connectors", "connector_rope_base_seq_len"),
    ("vae", "scaling_factor"),
    ("audio_vae", "sample_rate"),
    ("audio_vae", "mel_hop_length"),
    ("audio_vae", "mel_bins"),
    ("vocoder", "output_sampling_rate"),
)
_ONE = (
    ("transformer", "patch_size"),
    ("transformer", "patch_size_t"),
    ("transformer", "audio_patch_size"),
    ("transformer", "audio_patch_size_t"),
    ("vae", "patch_size_t"),
)

Rule = tuple[bool, str]
"""Whether it holds, and what is wrong if not."""


def check_fit(modules: Mapping[str, Any], *, variant: str, vocabulary: int) -> None:
    """Refuse components that belong to another variant or do not fit each other. Raises: CheckpointError."""
    rules = (
        *_variant_rules(modules, variant),
        *_video_rules(modules),
        *_sound_rules(modules),
        *_bandwidth_rules(modules["vocoder"].config),
        *_text_rules(modules, vocabulary),
        *_number_rules(modules),
    )
    faults = [fault for holds, fault in rules if not holds]
    if faults:
        raise CheckpointError(f"LTX-2 weights: {'; '.join(faults)}. Use the components of one release.")


def check_upsampler(config: Any, vae_config: Any) -> None:
    """Refuse a latent upsampler that does not double height and width. Raises: CheckpointError."""
    scale = config.rational_spatial_scale if config.use_rational_resampler else 2.0
    if config.temporal_upsample or not config.spatial_upsample or scale != 2.0:
        raise CheckpointError(
            "LTX-2 weights: the latent_upsampler does not double height and width alone, as model.two_stage "
            "needs. Use the spatial upsampler x2 of the release."
        )
    if config.in_channels != vae_config.latent_channels:
        raise CheckpointError(
            f"LTX-2 weights: the latent_upsampler takes {config.in_channels} channels, the VAE has "
            f"{vae_config.latent_channels}. Use the components of one release."
        )


def check_scheduler(scheduler: Any, *, variant: str) -> None:
    """Refuse a scheduler that does not belong to the variant. Raises: CheckpointError."""
    low, high = scheduler.config.base_image_seq_len, scheduler.config.max_image_seq_len
    shifts = (scheduler.config.base_shift, scheduler.config.max_shift)
    if None in shifts or low == high:
        raise CheckpointError(
            f"LTX-2 weights: scheduler.base_shift and max_shift are {shifts[0]} and {shifts[1]}, for {low} "
            f"and {high} tokens: LTX-2 needs two shifts, for unequal numbers. Fetch its folder again."
        )
    if variant == "2.0-distilled" and moves(scheduler, DISTILLED_SIGMAS):
        raise CheckpointError(
            "LTX-2 weights: the scheduler moves the noise levels that 2.0-distilled was trained for, as that "
            "of 2.0 does: set model.variant to what they are, or fetch the distilled release's scheduler."
        )


def _variant_rules(modules: Mapping[str, Any], variant: str) -> Iterator[Rule]:
    is_23 = variant == "2.3"
    yield (
        modules["transformer"].prompt_modulation == is_23
        and modules["connectors"].config.per_modality_projections == is_23,
        f"these weights are not of LTX-{variant}: set model.variant to what they are",
    )


def _video_rules(modules: Mapping[str, Any]) -> Iterator[Rule]:
    vae, taken = modules["vae"], modules["transformer"].config.in_channels
    noise = vae.config.decoder_inject_noise  # one for all blocks, or one a block
    yield (
        vae.config.latent_channels == taken,
        f"the transformer takes {taken} video channels, the VAE has {vae.config.latent_channels}",
    )
    yield (
        (vae.temporal_compression_ratio, vae.spatial_compression_ratio) == (8, 32),
        f"the VAE makes a latent of {vae.temporal_compression_ratio} frames and "
        f"{vae.spatial_compression_ratio} pixels a side, LTX-2's of 8 and 32",
    )
    yield (
        not vae.config.timestep_conditioning and not (noise if isinstance(noise, bool) else any(noise)),
        "the VAE adds noise of its own when it decodes, which this version does not do",
    )


def _sound_rules(modules: Mapping[str, Any]) -> Iterator[Rule]:
    """How audio latents, spectrogram and vocoder meet."""
    audio_vae, ratio = modules["audio_vae"].config, modules["audio_vae"].mel_compression_ratio
    bins, channels = audio_vae.mel_bins or 0, audio_vae.output_channels
    yield bins % ratio == 0, f"audio_vae.mel_bins is {bins}, which has to be a multiple of {ratio}"
    width = audio_vae.latent_channels * (bins // ratio)
    taken = modules["transformer"].config.audio_in_channels
    yield width == taken, f"the transformer takes {taken} audio channels, the audio VAE has {width}"
    inputs = modules["vocoder"].config.in_channels
    yield (
        channels * bins == inputs,
        f"the vocoder takes spectrograms of {inputs} channels, the audio VAE makes {channels} of {bins} bins",
    )


def _bandwidth_rules(vocoder: Any) -> Iterator[Rule]:
    """How the two parts of `LTX2VocoderWithBWE` meet; nothing for the plain one."""
    if "bwe_in_channels" not in vocoder:
        return
    channels = (vocoder.out_channels * vocoder.num_mel_channels, vocoder.out_channels)
    yield (
        (vocoder.bwe_in_channels, vocoder.bwe_out_channels) == channels,
        f"vocoder.bwe_in_channels and bwe_out_channels are {vocoder.bwe_in_channels} and "
        f"{vocoder.bwe_out_channels}, its first part needs {channels[0]} and {channels[1]}",
    )
    ratio, rest = divmod(vocoder.output_sampling_rate, vocoder.input_sampling_rate)
    yield (
        rest == 0 and prod(vocoder.bwe_upsample_factors) == vocoder.hop_length * ratio,
        f"the vocoder's second part makes {prod(vocoder.bwe_upsample_factors)} samples of a hop of "
        f"{vocoder.hop_length} from {vocoder.input_sampling_rate} to {vocoder.output_sampling_rate} Hz",
    )
    yield (
        0 <= vocoder.window_length - vocoder.filter_length < vocoder.hop_length,
        f"vocoder.window_length is {vocoder.window_length}, filter_length {vocoder.filter_length}: between "
        "its parts, spectrograms would not have one frame a hop",
    )


def _text_rules(modules: Mapping[str, Any], vocabulary: int) -> Iterator[Rule]:
    connectors, text = modules["connectors"].config, modules["text_encoder"].config
    states, width = connectors.text_proj_in_factor, connectors.caption_channels
    yield (
        (width, states) == (text.hidden_size, text.num_hidden_layers + 1),
        f"the connectors take {states} states of {width} channels, the text encoder gives "
        f"{text.num_hidden_layers + 1} of {text.hidden_size}",
    )
    yield (
        vocabulary <= text.vocab_size,
        f"the tokenizer has {vocabulary} tokens, the text encoder {text.vocab_size}",
    )


def _number_rules(modules: Mapping[str, Any]) -> Iterator[Rule]:
    for name, key in _ABOVE_ZERO:
        value = modules[name].config[key]
        yield value is not None and value > 0, f"{name}.{key} is {value}, which has to be above 0"
    for name, key in _ONE:
        value = modules[name].config[key]
        yield value == 1, f"{name}.{key} is {value}, LTX-2's is 1"
