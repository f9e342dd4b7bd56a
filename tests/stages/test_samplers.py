import pytest
import torch

from accel.errors import ConfigError
from stages.guidance import combine, passes, resolve_guidance
from stages.samplers import Euler, History, UniPC, sampler_plan

CPU = torch.device("cpu")
SCHEDULES = ("1_shift5", "2_shift5", "3_shift5", "4_shift5", "8_shift5", "4_shift1", "10_shift3", "16_shift5")


def video_velocity(x, t):
    return 0.7 * x - 0.35 + t


def action_velocity(x, t):
    return -0.55 * x * t + 0.2


def plan_of(case):
    config = case["config"]
    return sampler_plan(config["sampler"], steps=config["num_inference_steps"], shift=config["sampler_shift"])


def denoise(plan, start, velocity):
    """All samples that the model sees, and the final one."""
    sample, history, seen = start, History(), []
    for step, t in zip(plan.steps(CPU), plan.times, strict=True):
        seen.append(sample)
        sample, history = step(sample, velocity(sample, t), history)
    return torch.stack(seen), sample


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cosmos_unipc_reproduces_the_reference_trajectory(golden, golden_case, schedule):
    case = golden_case(f"cosmos_unipc_{schedule}")
    tensors, names, tol = golden(case["file"]), case["outputs"], case["tol"]
    plan = plan_of(case)
    assert torch.equal(torch.tensor(plan.times), tensors[names["t"]])
    assert [int(t * 1000 + 0.5) for t in plan.times] == tensors[names["ticks"]].tolist()
    assert torch.equal(torch.tensor(plan.sigmas), tensors[names["sigmas"]])
    for stream, velocity in (("video", video_velocity), ("action", action_velocity)):
        states, final = denoise(plan, tensors[case["inputs"][stream]], velocity)
        torch.testing.assert_close(states, tensors[names[f"{stream}_states"]], **tol)
        torch.testing.assert_close(final, tensors[names[f"{stream}_final"]], **tol)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_euler_reproduces_the_reference(golden, golden_case, schedule):
    case = golden_case(f"euler_{schedule}")
    tensors, names, tol = golden(case["file"]), case["outputs"], case["tol"]
    plan = plan_of(case)
    assert torch.equal(torch.tensor(plan.sigmas), tensors[names["times"]])
    assert plan.times == plan.sigmas[:-1]
    assert plan.times[0] == 1.0
    for stream, velocity in (("video", video_velocity), ("action", action_velocity)):
        _, final = denoise(plan, tensors[case["inputs"][stream]], velocity)
        torch.testing.assert_close(final, tensors[names[f"{stream}_final"]], **tol)


def test_coefficients_of_the_released_schedule():
    """A row holds sigma, then keep, data, curve, inverse ratio and correction of corrector and predictor."""
    first, second, third, last = sampler_plan("cosmos_unipc", steps=4, shift=5.0).coefficients
    near = lambda value: pytest.approx(value, abs=2e-6)  # noqa: E731
    assert first[6:8] == (near(0.937453), near(0.062547))
    assert second[5] == near(0.031273)
    assert second[8:10] == (near(0.055593), near(1 / -5.300101))
    assert (third[3], third[5]) == (near(0.002884), near(0.062671))
    assert not any(last[1:])


@pytest.mark.parametrize("steps", [4, 12])
def test_all_steps_in_the_middle_have_the_same_terms(steps):
    """So that one graph serves them; first, second and last step differ."""
    first, second, *middle, last = sampler_plan("cosmos_unipc", steps=steps, shift=5.0).solvers
    assert set(middle) == {UniPC(corrector=2, predictor=2)}
    assert (first, second, last) == (
        UniPC(corrector=0, predictor=1),
        UniPC(corrector=1, predictor=2),
        UniPC(corrector=0, predictor=0),
    )
    assert set(sampler_plan("euler", steps=steps, shift=5.0).solvers) == {Euler()}


@pytest.mark.parametrize("name", ["cosmos_unipc", "euler"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_constant_velocity_ends_at_the_data(name, steps):
    """With v = noise - data the path is straight, so any step count reaches the data."""
    generator = torch.Generator().manual_seed(0)
    noise, data = torch.randn(2, 3, 4, generator=generator).double()
    plan = sampler_plan(name, steps=steps, shift=5.0)
    start = plan.sigmas[0] * noise + (1 - plan.sigmas[0]) * data
    _, final = denoise(plan, start, lambda x, t: noise - data)
    torch.testing.assert_close(final, data, rtol=0, atol=1e-6)


def test_plans_are_shared_and_hashable():
    plan = sampler_plan("cosmos_unipc", steps=4, shift=5.0)
    assert plan is sampler_plan("cosmos_unipc", steps=4, shift=5.0)
    assert hash(plan) != hash(sampler_plan("cosmos_unipc", steps=4, shift=3.0))


def test_steps_do_not_write_to_their_arguments():
    steps = sampler_plan("cosmos_unipc", steps=4, shift=5.0).steps(CPU)
    sample, velocity, history = torch.ones(4), torch.full((4,), 0.5), History()
    for step in steps[:3]:
        sample, history = step(sample, velocity, history)
    kept = [t.clone() for t in (sample, *history.predictions, history.predicted_from)]
    for step in steps[1:]:
        step(sample, velocity, history)
    assert torch.equal(velocity, torch.full((4,), 0.5))
    now = (sample, *history.predictions, history.predicted_from)
    assert all(map(torch.equal, kept, now))


@pytest.mark.parametrize(
    ("name", "steps", "shift", "says"),
    [
        ("unipc", 4, 5.0, "cosmos_unipc"),
        ("euler", 0, 5.0, "num_inference_steps"),
        ("euler", 4, 0.0, "sampler_shift"),
        ("cosmos_unipc", 4, float("nan"), "sampler_shift"),
        ("cosmos_unipc", 4, 1e6, "sampler_shift"),
    ],
)
def test_wrong_settings_are_refused_by_name(name, steps, shift, says):
    with pytest.raises(ConfigError, match=says):
        sampler_plan(name, steps=steps, shift=shift)


def test_guidance_resolution_follows_every_golden_row(golden_json):
    for row in golden_json("protocol.json")["guidance"]:
        scales = resolve_guidance(*row["package"], *row["request"])
        assert scales == (row["video"], row["action"]), row
        assert passes(*scales) == row["passes"], row


def test_guidance_rounds_each_operation_to_the_model_dtype():
    uncond = torch.tensor([1.0, 256.0], dtype=torch.bfloat16)
    cond = torch.tensor([1.0078125, 1.0], dtype=torch.bfloat16)
    guided = combine(uncond, cond, 4.0)
    assert guided.dtype == torch.bfloat16
    assert torch.equal(guided, uncond + (4.0 * (cond - uncond).float()).bfloat16())
