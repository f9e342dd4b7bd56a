import pytest
import torch

from pipelines.flux3_action.policy_config import PolicyConfig, TransformerConfig
from pipelines.flux3_action.position_ids import (
    pack_actions,
    pack_latents,
    stream_position_ids,
    text_position_ids,
    unpack_actions,
    unpack_latents,
)

MODALITY = "action_prediction_droid"


def policy(*, chunk=32, fps=15.0, layout="single", canvas_hw=(544, 736)):
    channels = {"video": 96, "video_cond": 96, MODALITY: 8, f"{MODALITY}_cond": 8}
    return PolicyConfig(
        action_modality=MODALITY,
        action_dim=8,
        chunk_size=chunk,
        camera_layout=layout,
        camera_keys=("images.cam",),
        canvas_hw=canvas_hw,
        transformer=TransformerConfig(in_channels=channels),
        fps=fps,
    )


@pytest.mark.parametrize("number", range(4))
def test_stream_ids_are_exact(golden, golden_case, number):
    case = golden_case(f"position_ids_{number}")
    config, tensors = case["config"], golden(case["file"])
    height, width = config["latent_hw"]
    ids = stream_position_ids(
        policy(chunk=config["chunk"], fps=config["fps"], canvas_hw=(32 * height, 32 * width))
    )
    assert list(ids) == ["video", "video_cond", MODALITY, f"{MODALITY}_cond"]
    for role, stream in zip(("video", "video_cond", "action", "action_cond"), ids, strict=True):
        assert ids[stream].dtype == torch.int64
        assert torch.equal(ids[stream][0], tensors[case["outputs"][role]].long()), role


def test_droid_clock():
    ids = stream_position_ids(policy(layout="droid"))
    assert ids["video"].shape == (1, 2720, 4)
    assert ids["video"][0, ::340, 0].tolist() == [26, 53, 80, 106, 133, 160, 186, 213]
    assert ids[MODALITY][0, :12, 0].tolist() == [6, 13, 20, 26, 33, 40, 46, 53, 60, 66, 73, 80]
    assert ids[MODALITY][0, -1].tolist() == [213, 0, 0, 0]


def test_text_ids_are_exact(golden, golden_case):
    case = golden_case("position_ids_text")
    expected = golden(case["file"])[case["outputs"]["text"]].long()
    assert torch.equal(text_position_ids(case["config"]["length"])[0], expected)


def test_ids_stay_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        made = [text_position_ids(3), *stream_position_ids(policy(chunk=8)).values()]
    assert {ids.device.type for ids in made} == {"cpu"}


def test_packing_is_exact_and_reversible(golden, golden_case):
    case = golden_case("packing")
    tensors, names = golden(case["file"]), case["inputs"] | case["outputs"]
    latent, action = tensors[names["latent"]], tensors[names["action"]]
    assert torch.equal(pack_latents(latent), tensors[names["latent_tokens"]])
    assert torch.equal(pack_actions(action), tensors[names["action_tokens"]])
    assert torch.equal(unpack_latents(pack_latents(latent), tuple(latent.shape[-2:])), latent)
    assert torch.equal(unpack_actions(pack_actions(action)), action)


def test_latent_grid_drops_the_mirrored_margin(golden_json):
    for row in golden_json("protocol.json")["latent_hw"]:
        config = policy(layout=row["camera_layout"], canvas_hw=tuple(row["canvas_hw"]))
        assert list(config.latent_hw) == row["latent_hw"], row
