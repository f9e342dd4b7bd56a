"""Command lines that must work and command lines that must fail with one clear line (C14, C27)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from accel.errors import ConfigError
from tasks import config
from tasks.command_line import Plan, preflight

CASES = Path(__file__).parent.parent / "cases"
C14 = json.loads((CASES / "C14_overrides.json").read_text())
C27 = json.loads((CASES / "C27_typos.json").read_text())


def plan(*argv: str) -> Plan:
    return preflight(argv, config_dir=config.CONF, check=config.build)


def refusal(*argv: str) -> str:
    """The error of a command, which is one or two lines."""
    with pytest.raises(ConfigError) as caught:
        plan(*argv)
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def compose_c14(args: Sequence[str]) -> dict[str, Any]:
    trees: list[Any] = []
    preflight(args, config_dir=CASES / "C14_conf", check=lambda tree, _: trees.append(tree))
    (tree,) = trees
    return dict(tree)


@pytest.mark.parametrize(
    "text", ["don't drop it", "lift, the cube!", 'say "go": it\'s ok!', "costs $5, not `6`", "🤖 lift", "a,b"]
)
def test_the_suggested_quotes_keep_the_text(text: str) -> None:
    suggested = refusal(f"prompt={text}").partition("value: ")[2]
    (override,) = shlex.split(suggested)
    assert plan(override).configs[0].prompt == text


@pytest.mark.parametrize("row", [row for row in C14 if row["expect"] == "ok"], ids=lambda row: row["args"][0])
def test_c14_names_with_plus_signs_dots_and_digits(row: dict[str, Any]) -> None:
    tree = OmegaConf.create(compose_c14(row["args"]))
    for key, value in row["values"].items():
        assert OmegaConf.select(tree, key) == value


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["+graph+fusion=both"], ["+graph+fusion=both", "rename"]),
        (["model=2"], ["\"model='2'\""]),
        (["+experiment=flux2+ltx"], ["experiment", "Drop the plus"]),
        (["--config-name", "with_plus_group"], ["graph+fusion", "with_plus_group", "Rename"]),
    ],
)
def test_c14_one_line_for_names_that_cannot_be_reached(args: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_c14(args)
    assert len(str(caught.value).splitlines()) == 1
    assert all(word in str(caught.value) for word in words)


def test_c14_null_means_no_experiment() -> None:
    assert compose_c14(["experiment=null"])["seed"] == 0


# The case's key names are placeholders: the argument as given, the same slip with the names of
# this program, and what the message must contain.
TYPOS = {
    "stage.graph.max_entires=4": ("accel.max_entires=4", "did you mean 'accel.max_entries'?"),
    "stage.grpah.max_entries=4": ("acel.max_entries=4", "did you mean 'accel'?"),
    "+stage.graph.max_entires=4": ("+accel.max_entires=4", "did you mean 'accel.max_entries'?"),
    "++stage.graph.max_entires=4": ("++accel.max_entires=4", "did you mean 'accel.max_entries'?"),
    "stage.graph.max_entries=abc": (
        "accel.max_entries=abc",
        "expected a whole number from 1 to 256, got abc",
    ),
    "stage.graph.max_entries=0": ("accel.max_entries=0", "expected a whole number from 1 to 256, got 0"),
    "stage.graph.max_entries=-1": ("accel.max_entries=-1", "expected a whole number from 1 to 256, got -1"),
    "graph=ful": ("accel=grph", "did you mean 'graph'? Known: auto, compile, eager, fused, graph,"),
    "grph=full": ("acel=graph", "did you mean 'accel'?"),
    "+grph=full": ("+acel=graph", "did you mean 'accel'?"),
    "stage.graph.mode=brekable": ("accel.graph_mode=segmentd", "one of full, segmented"),
    "fusion.allowlist=[rmsnorm_modulte]": ("accel.fused={modulte: true}", "did you mean 'modulate'?"),
    "seed=007": ("seed=007", "seed: expected a whole number"),
}


@pytest.mark.parametrize("given", [row["args"][0] for row in C27])
def test_c27_a_misspelt_option_is_refused(given: str) -> None:
    argument, words = TYPOS[given]
    assert words in refusal(argument)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("accel:\n  max_entires: 4\n", "mine.yaml:3); did you mean 'accel.max_entries'?"),
        ("acel:\n  max_entries: 4\n", "mine.yaml:2); did you mean 'accel'?"),
        ("accel: {max_entries: abc}\n", "expected a whole number from 1 to 256, got abc"),
        ("accel: {fused: {modulte: true}}\n", "did you mean 'modulate'?"),
        ("accel: {stages: {vea: {max_entries: 2}}}\n", "did you mean 'vae'?"),
        ("accel: {fused: [swiglu]}\n", "mine"),
        ("seed: 007\n", "mine.yaml:2: seed: 007 would be read as a number in another base"),
        ("seed: 1\nseed: 2\n", "'seed' stands twice, on line 2 and on line 3"),
        ("defaults:\n  - override /accel: grph\n", "'accel/grph'; did you mean 'graph'?"),
        ("prompt: ${nope}\n", "prompt: Interpolation key 'nope' not found"),
        ("extras:\n  a: ???\n", "extras.a"),
        ("prompt: [\n", "mine.yaml:3: not valid YAML"),
    ],
)
def test_c27_the_same_slips_in_a_file_of_the_user(text: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\n" + text)
    assert words in refusal("--config-dir", str(tmp_path), "experiment=mine")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("guidance=1", "did you mean 'model.guidance'?"),
        ("accel.fused=[swiglu]", "'accel.fused={swiglu: true}'"),
        ("accel.stages.vea.max_entries=2", "did you mean 'vae'?"),
        ("accel.stages.vae.max_entires=2", "did you mean 'accel.stages.vae.max_entries'?"),
        ("prompt=7", "\"prompt='7'\""),
        ("prompt=12345e67", "12345e67"),
        ("model.guidance=inf", "finite"),
        ("seed=1,2", "Add -m"),
        ("prompt=put (it) down", "\"prompt='put (it) down'\""),
        ("seed", "Write key=value"),
        ("=x", "'=x' names nothing"),
        ("+ =x", "names nothing"),
        ("model=null", "one option is needed"),
        ("weights.path=./p", "use weights=local"),
        ("weights=local,./p", "weights.path=./a,./b"),
        ("weights=local", "weights.path"),
        ("weights=tests/golden/flux3/package", "write weights=./tests/golden/flux3/package"),
        ("device=cuda:99999999999999999999", "expected auto, cpu, cuda or cuda:N"),
        ("device=gpu", "did you mean 'cuda'?"),
        ("dtype=float32", "did you mean 'fp32'?"),
        ("~seed", "set seed=..."),
        ("observation.npz=a.npz", "exactly one of episode, npz, images"),
        ("hydra.run.dri=x", "dri"),
        ("hydra/launchr=basic", "did you mean 'hydra/launcher'?"),
        ("++hydra.callbacks.mine._target_=os.system", "not allowed"),
        ("--confg", "--confg"),
        ("accel=missing.yaml", "accel=missing.yaml: no such file"),
        ("accel=eager,mine.yaml", "--config-dir mine accel=eager,kept"),
        ("accel.stages.vae.loop=whole", "'vae' runs no loop. Stages that do: denoising."),
        (
            "accel.stages.action_decoding.enable_cuda_graph=false",
            "'action_decoding' is no stage with regions",
        ),
    ],
)
def test_mistakes_say_what_to_do(argument: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.ROOT)
    assert words in refusal(argument)


@pytest.mark.parametrize(
    ("given", "written_out"),
    [
        ("weights=./p", ["weights=local", "weights.path='./p'"]),
        ("weights=/data/p", ["weights=local", "weights.path='/data/p'"]),
        ("output.dir=~/p", ["output.dir='~/p'"]),
        ("weights=me/droid", ["weights=hub", "weights.repo='me/droid'"]),
        ("weights=me/droid@12e5", ["weights=hub", "weights.repo='me/droid'", "weights.revision='12e5'"]),
        ("experiment=null", ["~experiment"]),
        ("accel.stages.vae.fused.swiglu=false", ["++accel.stages.vae.fused.swiglu=false"]),
        ("+seed=3", ["++seed=3"]),
        ("extras.lab.shelf=3", ["++extras.lab.shelf=3"]),
        ("seed=3", ["seed=3"]),
    ],
)
def test_what_hydra_gets(given: str, written_out: list[str]) -> None:
    *overrides, folder = plan(given).argv
    assert overrides == written_out
    assert folder.startswith("hydra.run.dir=")


def test_every_job_of_a_sweep_is_checked_before_the_first() -> None:
    assert "got abc" in refusal("-m", "seed=1,abc,3")
    assert "null" in refusal("-m", "experiment=null,droid_lift")


def test_a_sweep_lists_its_jobs_in_order() -> None:
    jobs = plan("-m", "accel=eager,graph", "seed=1,2", "accel.stages.vae.max_entries=2").jobs
    assert [job.overrides[:2] for job in jobs] == [
        ("accel=eager", "seed=1"),
        ("accel=eager", "seed=2"),
        ("accel=graph", "seed=1"),
        ("accel=graph", "seed=2"),
    ]
    assert [job.folder.name for job in jobs] == ["0", "1", "2", "3"]


def test_a_sweep_over_a_pattern_has_the_options_that_match() -> None:
    jobs = plan("-m", "accel=glob([graph*,eager],exclude=*fused)").jobs
    assert [job.overrides for job in jobs] == [("accel=eager",), ("accel=graph",)]


def test_a_shuffled_sweep_has_one_order() -> None:
    shuffled = plan("-m", "seed=shuffle(range(0,9))", "prompt=shuffle('a, b',c)")
    ordered = {job.overrides[0]: None for job in shuffled.jobs}
    assert sorted(ordered) == [f"seed={number}" for number in range(9)]
    seeds = ",".join(text.removeprefix("seed=") for text in ordered)
    assert shuffled.argv[1] == f"seed={seeds}"
    prompts = [job.overrides[1].removeprefix("prompt=") for job in shuffled.jobs[:2]]
    assert shuffled.argv[2] == f"prompt={','.join(prompts)}"
    assert {settings.prompt for settings in shuffled.configs} == {"a, b", "c"}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("seed=range(3,1)", "'seed=range(3,1)' names no value"),
        ("accel=glob(x*)", "'accel=glob(x*)' names no value"),
        ("seed=range(1,3,0)", "this sweep can't be listed"),
        ("seed=interval(1,3)", "this sweep can't be listed"),
    ],
)
@pytest.mark.parametrize("sweeper", ["basic", "optuna"])
def test_a_sweep_without_a_job_is_refused(argument: str, words: str, sweeper: str) -> None:
    if sweeper == "optuna":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    assert words in refusal("-m", argument, f"hydra/sweeper={sweeper}")


def test_a_folder_with_a_result_is_never_used_again(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert "already holds a result.json" in refusal(f"output.dir='{tmp_path}'")


def test_two_commands_of_one_second_have_two_folders() -> None:
    first, second = plan("seed=1").jobs[0].folder, plan("seed=1").jobs[0].folder
    assert first != second
    assert first.parent.name == second.parent.name


def test_no_other_type_is_suggested_for_a_dtype() -> None:
    assert "did you mean" not in refusal("dtype=fp16")
    assert "did you mean" not in refusal("dtype=float16")


def test_the_home_folder_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan("output.dir=~/p").jobs[0].folder == tmp_path / "p"
