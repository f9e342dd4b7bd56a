"""The shipped configuration: every documented command composes, and typed fields mean what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from accel.errors import ConfigError
from accel.policy import AccelPolicy
from accel.site_names import FUSED_NAMES, SITE_NAMES
from pipelines.catalogue import MODELS
from pipelines.flux3_action.settings import Flux3Settings
from tasks.composition import Composer
from tasks.config import CONF, RunConfig, build, compose, config_hash

REPO = CONF.parent


def run(*argv: str, cwd: Path = REPO, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """python: options of the interpreter."""
    command = [sys.executable, *python, str(REPO / "run.py"), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def composed(*overrides: str) -> RunConfig:
    """A configuration, also one that this version does not carry out."""
    result = Composer(CONF).compose(overrides)
    return build(result.tree, result.source)


COMMANDS = [
    "model=flux3_action accel=graph+fused",
    "model=flux2_klein accel=graph accel.max_entries=2",
    "model=ltx2 accel=segmented accel.max_segments=512",
    "accel.stages.vae.enable_cuda_graph=false",
    "accel.fused={swiglu: true};accel.fused.qk_norm_rope=false",
    "task=verify",
    "task=bench",
    "task=profile",
    "task=serve",
    "model=flux2_dev",
    "experiment=droid_lift",
    *(f"accel={path.stem}" for path in (CONF / "accel").glob("*.yaml")),
    "logger=quiet weights=hub weights.repo=a/b",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_documented_choice_composes(command: str) -> None:
    overrides = command.split(";") if ";" in command else command.split()
    assert composed(*overrides)


def test_the_defaults() -> None:
    config = compose()
    assert config.model == Flux3Settings()
    assert config.accel == compose("accel=graph+fused").accel
    assert config.task.name == "run"
    assert config.weights.kind == "synthetic"
    assert (config.size, config.device, config.dtype, config.seed) == ("auto", "auto", "auto", None)
    assert config.observation is not None
    assert config.observation.episode == "data/panda_lift"


@pytest.mark.parametrize("name", [path.stem for path in (CONF / "accel").glob("*.yaml")])
def test_accel_files_name_themselves_and_write_out_every_field(name: str) -> None:
    fields = yaml.safe_load((CONF / "accel" / f"{name}.yaml").read_text())
    assert fields["name"] == name
    assert set(fields) == set(AccelPolicy.__dataclass_fields__)
    assert set(fields["fused"]) == set(FUSED_NAMES)


def test_graph_and_fused_is_the_union_of_both() -> None:
    both, graph, fused = (compose(f"accel={name}").accel for name in ("graph+fused", "graph", "fused"))
    assert (both.enable_cuda_graph, both.fused) == (graph.enable_cuda_graph, fused.fused)
    assert graph.enable_cuda_graph
    assert not any(graph.fused.values())
    assert not fused.enable_cuda_graph
    assert {name for name, on in fused.fused.items() if on} == set(SITE_NAMES)


def test_one_stage_can_differ() -> None:
    accel = compose(
        "accel.stages.vae.enable_cuda_graph=false", "accel.stages.denoising.fused.swiglu=false"
    ).accel
    assert not accel.for_stage("vae").enable_cuda_graph
    assert accel.for_stage("denoising").enable_cuda_graph
    assert not accel.for_stage("denoising").fused["swiglu"]
    assert accel.for_stage("denoising").fused["modulate"]


def test_short_forms_mean_the_same_to_a_library(tmp_path: Path) -> None:
    hub = compose("weights=me/droid@main").weights
    assert (hub.kind, hub.repo, hub.revision) == ("hub", "me/droid", "main")
    local = compose("weights=./p").weights
    assert (local.kind, local.path) == ("local", "./p")
    file = tmp_path / "mine.yaml"
    file.write_text("max_entries: 7\n")
    assert compose(f"accel={file}").accel == replace(compose("accel=eager").accel, max_entries=7)


def test_the_allowlist_merges() -> None:
    fused = compose("accel=eager", "accel.fused={swiglu: true}").accel.fused
    assert fused == {**dict.fromkeys(FUSED_NAMES, False), "swiglu": True}


def test_loose_images_as_observation() -> None:
    observation = compose(
        "observation.episode=null", "observation.images.wrist=a.png", "observation.state=[0,1.5]"
    ).observation
    assert observation is not None
    assert observation.images == {"wrist": "a.png"}
    assert observation.state == [0.0, 1.5]


@pytest.mark.parametrize("given", ["observation={episode: x}", "observation.frame=3", "observation=5"])
def test_models_without_eyes_take_no_observation(given: str) -> None:
    with pytest.raises(ConfigError, match="model=ltx2 takes none; leave it out"):
        composed("model=ltx2", given)


def test_free_keys_have_one_place() -> None:
    assert compose("extras.shelf=3").extras == {"shelf": 3}
    with pytest.raises(ConfigError, match="unknown key 'shelf'"):
        compose("+shelf=3")


def test_the_hash_follows_settings_and_not_places() -> None:
    assert config_hash(compose()) == config_hash(compose("output.dir=elsewhere", "logger=quiet"))
    assert config_hash(compose()) != config_hash(compose("seed=1"))


def test_the_shipped_episode_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home = config_hash(compose())
    monkeypatch.chdir(tmp_path)
    config = compose()
    assert config.observation is not None
    assert config.observation.episode == str(REPO / "data" / "panda_lift")
    assert config_hash(config) == at_home
    (tmp_path / "data" / "panda_lift").mkdir(parents=True)
    assert compose().observation == compose("observation.episode=data/panda_lift").observation
    assert compose("observation.episode=nowhere").observation.episode == "nowhere"  # type: ignore[union-attr]


def test_the_home_folder_is_written_out_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = compose("observation.episode=~/e", "accel.manifest=~/m.json", "output.dir=~/o")
    assert config.observation is not None
    assert config.observation.episode == f"{tmp_path}/e"
    assert config.accel.manifest == f"{tmp_path}/m.json"
    assert config.output.dir == f"{tmp_path}/o"


def test_the_catalogue_knows_every_model_file() -> None:
    assert set(MODELS) == {path.stem for path in (CONF / "model").glob("*.yaml")}


@pytest.mark.parametrize("name", MODELS)
def test_the_catalogue_lists_the_stages_with_regions_and_with_loops(name: str) -> None:
    from accel.region import loop_bodies_of, regions_of
    from pipelines.build import build as build_pipeline

    all_stages = {"ltx2": ("model.two_stage=true",)}.get(name, ())
    pipeline = build_pipeline(compose(f"model={name}", "size=tiny", "device=cpu", "accel=eager", *all_stages))
    loops = [stage.name for stage in pipeline.stages if any(loop_bodies_of(stage))]
    stages = [stage.name for stage in pipeline.stages if any(regions_of(stage)) or stage.name in loops]
    assert (tuple(stages), tuple(loops)) == (MODELS[name].stages, MODELS[name].loops)


def test_a_typo_costs_two_lines_and_no_torch(tmp_path: Path) -> None:
    done = run("accel.max_entires=4", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") <= 2
    assert "did you mean 'accel.max_entries'?" in done.stderr
    assert list(tmp_path.iterdir()) == []
    imported = run("accel.max_entires=4", cwd=tmp_path, python=("-X", "importtime")).stderr.split()
    assert "tasks.command_line" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("flux2_klein", "prompt"),
        ("ltx2", "model.negative_prompt"),
        ("flux3_action", "weights.path"),
        ("flux3_action", "output.dir"),
    ],
)
def test_a_byte_that_is_not_utf8_is_one_line_before_anything_loads(
    model: str, key: str, tmp_path: Path
) -> None:
    done = run(f"model={model}", f"{key}='a {os.fsdecode(bytes([255]))} cat'", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{key}: not UTF-8 text (command line). Write it in UTF-8.\n"
    assert list(tmp_path.iterdir()) == []


def test_half_a_character_in_a_policy_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('manifest: "\\ud800"\n')
    with pytest.raises(ConfigError, match=r"^accel\.manifest: not UTF-8 text"):
        compose(f"accel={tmp_path / 'mine.yaml'}")


def test_the_version_is_that_of_samebit() -> None:
    shown = run("--version")
    assert (shown.returncode, shown.stdout[:8]) == (0, "Samebit ")


def test_show_and_help_print_the_configuration() -> None:
    shown = run("--cfg", "job", "accel.stages.vae.enable_cuda_graph=false")
    assert shown.returncode == 0
    assert yaml.safe_load(shown.stdout)["accel"]["stages"] == {"vae": {"enable_cuda_graph": False}}
    helped = run("--help")
    assert helped.returncode == 0
    assert "accel: auto, compile, eager, fused, graph, graph+fused, segmented" in helped.stdout


def test_a_client_of_a_model_that_takes_no_observations_is_told_which_one_does(tmp_path: Path) -> None:
    done = run("task=client", "model=flux2_klein", cwd=tmp_path)
    assert done.returncode == 2
    assert "model=flux3_action; model=flux2_klein takes none" in done.stderr
