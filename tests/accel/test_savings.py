"""Savings: who may take one, what the record says of it, and what the configuration refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import yaml
from torch import Tensor, nn

from accel.errors import ConfigError
from accel.fusion.savings import takes
from accel.fusion.scope import fusion_scope
from accel.graphs.recording import RecordingBackend
from accel.policy import AccelPolicy, StageOverride
from accel.record import Kind, Reason, SiteOutcome
from accel.region import region
from accel.runner import Runner
from accel.site_names import FUSED_NAMES, SAVING_NAMES
from tasks.config import CONF

TAKEN = SiteOutcome("batched_guidance", fused=True)


class Doubling:
    """Takes a saving unless its input has more than four elements."""

    name: ClassVar[str] = "doubling"

    def modules(self) -> Mapping[str, nn.Module]:
        return {}

    def mounts(self, allowed: frozenset[str]) -> Sequence[Any]:
        return ()

    @region
    def double(self, x: Tensor) -> Tensor:
        return 2 * x if takes("batched_guidance", unless="too long" if x.numel() > 4 else "") else x + x


def bound(policy: AccelPolicy) -> tuple[Doubling, Runner]:
    stage, runner = Doubling(), Runner(policy, device=torch.device("cpu"), backend=RecordingBackend())
    runner.bind(stage)
    return stage, runner


@pytest.fixture
def saving(eager_policy: AccelPolicy) -> AccelPolicy:
    return replace(eager_policy, fused={"batched_guidance": True})


def test_only_a_scope_that_allows_the_name_lets_it_be_taken() -> None:
    seen: list[SiteOutcome] = []
    assert not takes("batched_guidance")
    with fusion_scope(frozenset({"swiglu", "skip_unused_guidance"}), seen.append):
        assert not takes("batched_guidance")
    assert seen == []
    with fusion_scope(frozenset({"batched_guidance"}), seen.append):
        assert takes("batched_guidance")
        assert not takes("batched_guidance", unless="too long")
    assert seen == [TAKEN, SiteOutcome("batched_guidance", False, Reason.UNSUPPORTED_INPUT, "too long")]


def test_a_compiler_sees_no_saving() -> None:
    with fusion_scope(frozenset(SAVING_NAMES), lambda outcome: pytest.fail("observed while compiling")):
        compiled = torch.compile(
            lambda x: 3 * x if takes("batched_guidance") else 2 * x, backend="eager", fullgraph=True
        )
        assert torch.equal(compiled(torch.ones(2)), 2 * torch.ones(2))


def test_the_stage_is_labelled_from_the_first_time_on(saving: AccelPolicy) -> None:
    stage, runner = bound(saving)
    stage.double(torch.ones(5))
    assert runner.record.stage("doubling").tier == "exact"
    assert runner.strict_violations() == [
        "doubling: reference (unsupported_input): batched_guidance: too long"
    ]
    runner.new_record()
    stage.double(torch.ones(4))
    row = runner.record.stage("doubling").to_dict()
    assert row["tier"] == "moved_rounding"
    assert row["sites"] == [
        {"site": "batched_guidance", "fused": True, "reason": None, "detail": "", "count": 1}
    ]
    assert runner.strict_violations() == []


def test_a_replay_counts_nothing_and_keeps_the_label(saving: AccelPolicy) -> None:
    stage, runner = bound(replace(saving, enable_cuda_graph=True))
    stage.double(torch.ones(4))
    runner.new_record()
    assert torch.equal(stage.double(torch.full((4,), 3.0)), torch.full((4,), 6.0))
    record = runner.record.stage("doubling")
    assert [outcome.kind for outcome in record.outcomes] == [Kind.REPLAYED]
    assert (record.tier, record.sites) == ("moved_rounding", {})


def test_other_stages_and_policies_stay_exact(eager_policy: AccelPolicy) -> None:
    other = StageOverride(fused={"batched_guidance": True})
    stage, runner = bound(replace(eager_policy, stages={"vae": other}))
    stage.double(torch.ones(4))
    record = runner.record.stage("doubling")
    assert (record.tier, record.sites) == ("exact", {})


def test_the_tier_of_a_policy_is_the_worst_that_it_allows(saving: AccelPolicy) -> None:
    assert replace(saving, fused={"batched_guidance": False, "swiglu": True}).tier == "exact"
    assert saving.tier == "moved_rounding"
    in_one_stage = {"denoising": StageOverride(fused={"skip_ineffective_stg": True})}
    assert replace(saving, fused={}, stages=in_one_stage).tier == "moved_rounding"
    assert replace(saving, stages={"vae": StageOverride(compile="default")}).tier == "compiled"


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "accel").glob("*.yaml")))
def test_every_policy_names_all_savings_and_allows_none(name: str) -> None:
    fused = yaml.safe_load((CONF / "accel" / f"{name}.yaml").read_text())["fused"]
    assert tuple(fused) == FUSED_NAMES
    assert not any(fused[saving] for saving in SAVING_NAMES)


@pytest.mark.parametrize("near", ["batched_guidnce", "skip_unused_guidence"])
def test_a_misspelt_saving_is_told_its_name(saving: AccelPolicy, near: str) -> None:
    policy = replace(saving, fused={near: True})
    with pytest.raises(
        ConfigError, match=rf"accel\.fused: unknown name '{near}'.*did you mean '.*_guidance'"
    ):
        policy.check(stages=("denoising",), sites=("swiglu",))


def test_a_saving_that_the_model_lacks_is_refused_where_it_is_on(saving: AccelPolicy) -> None:
    check: dict[str, Any] = {"stages": ("denoising",), "sites": (), "savings": ("skip_ineffective_stg",)}
    replace(saving, fused={"batched_guidance": False}).check(**check)
    with pytest.raises(
        ConfigError, match=r"accel\.fused\.batched_guidance=true has no effect.*it has skip_in"
    ):
        saving.check(**check)
    own = {"denoising": StageOverride(fused={"batched_guidance": True})}
    with pytest.raises(ConfigError, match=r"accel\.stages\.denoising\.fused\.batched_guidance=true has no"):
        replace(saving, fused={}, stages=own).check(**check)


def test_what_excludes_savings_is_refused(saving: AccelPolicy) -> None:
    auto = replace(saving, auto_seconds=1.0)
    with pytest.raises(
        ConfigError, match=r"beside moved_rounding ones\. Set accel\.fused\.batched_guidance=f"
    ):
        auto.check(stages=("denoising",), sites=())
    compiling = replace(saving, compile="default", compile_scope="regional")
    with pytest.raises(ConfigError, match=r"compile=default and fused kernels \(batched_guidance\) exclude"):
        compiling.check(stages=("denoising",), sites=())
