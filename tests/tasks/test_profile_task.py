"""`task=profile`: categories, sums, gaps, traffic of fused kernels, and every way the task can end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_pipeline import CONFIG
from toy_pipeline import FUSED, GRAPHS, WIDTH, ToyPipeline, ToyRequest, gates

from accel.errors import OutputError, StrictModeError
from accel.fusion import modulate, registry
from accel.fusion.scope import fusion_scope
from accel.measure.activity import Gap, Span, Work, device_activity, observe
from accel.measure.stage_calls import around_stages
from accel.measure.trace import named_steps
from accel.measure.traffic import copy_bandwidth, counted_traffic, fused_kernel_names
from accel.policy import AccelPolicy, StageOverride
from tasks import arms, profile
from tasks.kernel_categories import category_of, short_name
from tasks.measurement_settings import ProfileTask
from tasks.profile import PROFILE_FILE, Profiling, graphless
from tasks.profile_table import sections
from tasks.stage_profile import FusedTraffic, StageProfile
from tasks.timed_arm import TimedArm

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TASK = ProfileTask(name="profile", warmup=1, calls=3, top=5)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(at::TensorIteratorBase&)>"
)
MEAN = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>"


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("aten::mm", "matmul"),
        ("aten::_scaled_mm", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>", "convolution"),
        ("aten::mkldnn_convolution", "convolution"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>", "norm"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>", "norm"),
        ("aten::native_group_norm", "norm"),
        (ADD, "elementwise"),
        ("aten::mul", "elementwise"),
        ("aten::mul_", "elementwise"),
        (COPY, "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<unsigned short, 3>", "copy"),
        ("aten::copy_", "copy"),
        ("aten::index", "copy"),
        (MEAN, "reduction"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 7>", "reduction"),
        ("aten::sum", "reduction"),
        ("_kernel", "ours"),
        ("triton_mystery", "other"),
        ("aten::view", "other"),
        ("aten::convert_element_type", "other"),
    ],
)
def test_categories(name: str, category: str) -> None:
    assert category_of(name, ours={"_kernel"}) == category


def test_names_are_short_enough_for_a_table() -> None:
    assert short_name(ADD, width=200).startswith("vectorized_elementwise_kernel<4, CUDAFunctor_add<")
    assert "(int" not in short_name(ADD, width=200)
    assert len(short_name(ADD)) == 60
    assert short_name("Memcpy HtoD (Host -> Device)") == "Memcpy HtoD (Host -> Device)"
    assert short_name("aten::native_layer_norm") == "aten::native_layer_norm"


def test_overlapping_kernels_count_once_as_busy_time() -> None:
    spans = [Span("a", 0, 1000), Span("b", 500, 2000), Span("a", 5000, 6000), Span("c", 6500, 7000)]
    activity = device_activity(spans)
    assert activity.work == (Work("a", 2, 2.0), Work("b", 1, 1.5), Work("c", 1, 0.5))
    assert activity.busy_ms == 3.5
    assert activity.gaps == (Gap(3.0, before="a"), Gap(0.5, before="c"))
    assert device_activity([]).busy_ms == 0.0


def test_operators_of_a_cpu_are_counted_by_their_own_time() -> None:
    x = torch.randn(128, 128)
    activity = observe(lambda: [torch.nn.functional.linear(x, x) for _ in range(3)], device=CPU)
    calls = {work.name: work.calls for work in activity.work}
    assert calls["aten::linear"] == 3
    assert activity.busy_ms == pytest.approx(sum(work.ms for work in activity.work))
    assert [work.ms for work in activity.work] == sorted((w.ms for w in activity.work), reverse=True)


def test_watched_stages_are_as_before_afterwards() -> None:
    pipeline, seen = ToyPipeline(), []

    def around(stage: str, call: Callable[[], None]) -> None:
        seen.append(stage)
        call()

    with around_stages(pipeline.stages, around):
        watched = pipeline.run(ToyRequest())
    assert seen == ["encoding", "denoising"]
    assert pipeline.run(ToyRequest()).digests == watched.digests
    assert seen == ["encoding", "denoising"]
    with pytest.raises(RuntimeError, match="stop"), around_stages(pipeline.stages, around):
        raise RuntimeError("stop")
    assert all("run" not in vars(stage) for stage in pipeline.stages)


def test_steps_are_named_where_a_profiler_runs_and_else_left_alone() -> None:
    steps = [lambda: None, lambda: None]
    assert named_steps(steps, "segment") is steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for step in named_steps(steps, "segment"):
            step()
    assert {row.key for row in profiler.key_averages()} >= {"segment 0", "segment 1"}


def test_bytes_of_fused_calls_are_counted_by_site(monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(registry, "gate", gates())
    x, row = torch.randn(1, 32, 8), torch.randn(1, 1, 8)
    with fusion_scope(frozenset({"modulate"}), lambda outcome: None):
        with counted_traffic() as moved:
            modulate(x, row, row)
            modulate(x, row, row)
        modulate(x, row, row)
    assert moved == {"modulate": 2 * (2 * x.nbytes + 2 * row.nbytes)}
    with counted_traffic() as moved:
        modulate(x, row, row)  # outside of a scope nothing is fused
    assert moved == {}


def test_fused_kernels_are_known_by_the_names_that_a_profiler_shows() -> None:
    pytest.importorskip("triton")
    registry.get("modulate").load()
    assert "_modulate_kernel" in fused_kernel_names()


def test_no_bandwidth_without_a_gpu() -> None:
    assert copy_bandwidth(CPU) is None


def test_a_stage_on_a_gpu() -> None:
    spans = [
        Span("nvjet_1", 0, 6000),
        Span(ADD, 6000, 8000),
        Span("_kernel", 8000, 9000),
        Span("Memset (Device)", 9000, 10000),
    ]
    traffic = FusedTraffic(moved={"swiglu": 3 * 10**9}, ms=1.0, copy_bandwidth=4e12)
    stage = StageProfile(
        name="denoising",
        p50_ms=12.5,
        activity=device_activity(spans),
        on_gpu=True,
        ours={"_kernel"},
        traffic=traffic,
    )
    assert stage.idle_ms == 2.5
    assert stage.by_category == {"matmul": 6.0, "elementwise": 2.0, "ours": 1.0, "copy": 1.0}
    assert [(row.category, row.could_be) for row in stage.unfused] == [
        ("elementwise", "fused"),
        ("copy", "avoided"),
    ]
    assert stage.rows[0].share == 0.6
    assert stage.to_dict()["traffic"]["roofline"] == pytest.approx(0.75)
    shown = {section.title: section.rows for section in sections([stage], top=1)}
    assert shown["Stages"] == [["denoising", "12.5", "10.0", "2.50", "20 %"]]
    assert shown["Fused kernels against a copy"] == [["denoising", "1.00", "2861.0", "3000", "75 %"]]
    assert len(shown["Longest"]) == 1


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the task in tmp_path and read its file."""

    def start(pipeline: ToyPipeline, policy: AccelPolicy = FUSED) -> dict[str, Any]:
        monkeypatch.setattr(arms, "build", lambda config, *, progress: pipeline)
        profile.main(replace(CONFIG, accel=policy, task=TASK), folder=tmp_path)
        return report(tmp_path)

    return start


def report(folder: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((folder / PROFILE_FILE).read_text())
    return written


def test_every_stage_is_profiled_and_timed_without_the_profiler(start, tmp_path, capsys) -> None:
    found = start(ToyPipeline())
    assert found["status"] == "ok"
    encoding, denoising = found["stages"]
    assert {"aten::addmm"} <= {row["name"] for row in encoding["kernels"]}
    assert {row["category"] for row in denoising["kernels"]} >= {"elementwise"}
    assert denoising["idle_ms"] is None
    assert [len(row["walls_ms"]) for row in found["record"]] == [3, 3]
    assert {path.name for path in tmp_path.iterdir()} == {PROFILE_FILE, "profile.md"}
    text = capsys.readouterr().out
    assert "nothing here is about a GPU" in text
    assert "Could still be fused" in text
    assert (tmp_path / "profile.md").read_text().startswith("# toy, tiny, float32, CPU, fused\n")


def test_traffic_is_counted_where_python_makes_the_calls(monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(registry, "gate", gates())
    pipeline = ToyPipeline(FUSED)
    profiling = Profiling(TimedArm("fused", pipeline), CPU)
    profiling.run(ToyRequest(), warmup=0, calls=1)
    profiling.count_traffic(ToyRequest(), FUSED)
    tokens, row = 64 * WIDTH * 4, WIDTH * 4
    assert profiling.moved["encoding"] == {}
    assert profiling.moved["denoising"]["modulate"] == 2 * tokens + 2 * row


def test_a_policy_without_graphs_keeps_everything_else() -> None:
    policy = replace(GRAPHS, fused={"swiglu": True}, stages={"vae": StageOverride(enable_cuda_graph=True)})
    without = graphless(policy)
    assert not without.for_stage("vae").enable_cuda_graph
    assert not without.for_stage("denoising").enable_cuda_graph
    assert without.for_stage("vae").fused == {"swiglu": True}


def test_ctrl_c_keeps_what_was_profiled(start, monkeypatch, tmp_path, capsys) -> None:
    observed = iter([observe])

    def until_the_first(*args: Any, **options: Any) -> Any:
        ready = next(observed, None)
        if ready is None:
            raise KeyboardInterrupt
        return ready(*args, **options)

    monkeypatch.setattr(profile, "observe", until_the_first)
    with pytest.raises(KeyboardInterrupt):
        start(ToyPipeline())
    found = report(tmp_path)
    assert (found["status"], [stage["name"] for stage in found["stages"]]) == ("interrupted", ["encoding"])
    assert "Interrupted" in capsys.readouterr().out


def test_strict_fails_after_everything_is_written(start, tmp_path) -> None:
    strict = replace(GRAPHS, strict=True)
    with pytest.raises(StrictModeError, match="no_cuda"):
        start(ToyPipeline(strict), strict)
    assert report(tmp_path)["status"] == "not_strict"


def test_a_second_run_does_not_replace_the_first(start) -> None:
    start(ToyPipeline())
    with pytest.raises(OutputError, match="already holds a result"):
        start(ToyPipeline())


def test_tiny_model_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "run.py", "task=profile", "task.warmup=0", "task.calls=1"),
            *("device=cpu", "logger=plain", "model.steps=1", f"output.dir={tmp_path / 'out'}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stages = {stage["name"]: stage for stage in report(tmp_path / "out")["stages"]}
    assert {"vae", "denoising", "action_decoding"} <= set(stages)
    assert stages["denoising"]["categories_ms"]["attention"] > 0
    assert "nothing here is about a GPU" in done.stdout
