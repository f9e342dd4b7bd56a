"""FLUX 3 Action at full size on one CUDA device: are the bits equal, and what does each policy gain?

    python docs/benchmarks/flux3_action.py OUT_FOLDER

Synthetic bf16 weights, DROID shapes, 4 steps, guidance 4.0 / 1.0, one process. All policies share the
weights. First 20 requests with changing observations, prompts and seeds are compared tensor by tensor with
eager; then the policies are timed in turn, forwards and backwards (A B B A), every request encoding its
prompt anew. Writes flux3_action.json and flux3_action.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accel.fusion.compare import first_mismatch, tensors_of
from accel.measure.profile import profile_call
from accel.measure.timing import percentile
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.request import ActionRequest
from pipelines.flux3_action.stages import Denoising
from pipelines.flux3_action.weights import load_components
from pipelines.pipeline import Placement
from pipelines.weights_config import WeightsConfig
from tasks.config import compose
from tasks.environment import device_facts, software

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("eager", "graph", "fused", "graph+fused")
PROMPTS = ("lift the red cube", "put the cube into the bowl", "open the drawer", "push it to the left", "")
WARM_UPS, ROUNDS = 3, 10


def main(out: Path) -> None:
    device = torch.device("cuda", 0)
    placement = Placement(device=device, dtype=torch.bfloat16, size="full", size_reason="benchmark")
    started = time.perf_counter()
    components = load_components(
        weights=WeightsConfig(kind="synthetic"),
        variant="base",
        size="full",
        device=device,
        dtype=torch.bfloat16,
    )
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "software": software(),
        "device": device_facts(str(device)),
        "load_s": time.perf_counter() - started,
    }
    pipelines = {
        arm: Flux3ActionPipeline(
            components,
            policy=compose(f"accel={arm}").accel,
            placement=placement,
            outputs_mean_nothing=True,
            caption_cache_tokens=0,
        )
        for arm in ARMS
    }
    requests = [_request(pipelines["eager"], index) for index in range(20)]
    report["equality"] = _equality(pipelines, requests)
    print(json.dumps(report["equality"], indent=1), flush=True)
    report["arms"] = _timing(pipelines, requests)
    report["joint_pass"] = _joint_pass(pipelines["eager"], requests[0])
    out.mkdir(parents=True, exist_ok=True)
    (out / "flux3_action.json").write_text(json.dumps(report, indent=1))
    (out / "flux3_action.md").write_text(_markdown(report))
    print(_markdown(report))


def _request(pipeline: Flux3ActionPipeline, index: int) -> ActionRequest:
    raw = dict(load_episode_frame(ROOT / "data" / "panda_lift", 3 * index))
    raw["prompt"] = PROMPTS[index % len(PROMPTS)]
    return pipeline.request(parse_observation(raw, pipeline.config), seed=index)


def _equality(pipelines: dict[str, Flux3ActionPipeline], requests: list[ActionRequest]) -> dict[str, Any]:
    """Every stage output of every request against eager's, down to the bit."""
    rows: dict[str, Any] = {}
    expected = [pipelines["eager"].run(request) for request in requests]
    for arm in ARMS[1:]:
        differing = []
        finite = True
        for index, (request, eager) in enumerate(zip(requests, expected, strict=True)):
            result = pipelines[arm].run(request)
            finite &= bool(torch.isfinite(torch.from_numpy(result.actions)).all())
            for name, value in result.outputs.items():
                mismatch = first_mismatch(_leaves(eager.outputs[name]), _leaves(value))
                if mismatch is not None:
                    differing.append(f"request {index}, {name}: {mismatch}")
        rows[arm] = {
            "requests": len(requests),
            "outputs_each": len(expected[0].outputs),
            "differing": differing,
            "finite": finite,
        }
    return rows


def _leaves(value: Any) -> list[torch.Tensor]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [value]
    return list(tensors_of([getattr(value, name) for name in value.__dataclass_fields__]))


def _timing(pipelines: dict[str, Flux3ActionPipeline], requests: list[ActionRequest]) -> dict[str, Any]:
    cold = {arm: pipelines[arm].record.to_dict() for arm in ARMS}
    walls: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        for request in requests[:WARM_UPS]:
            pipelines[arm].run(request)
        pipelines[arm].new_record()
    for turn in range(ROUNDS):
        order = ARMS if turn % 2 == 0 else ARMS[::-1]
        for arm in order:
            for request in requests[:5]:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                pipelines[arm].run(request)
                walls[arm].append((time.perf_counter() - begin) * 1e3)
    rows = {}
    for arm in ARMS:
        for request in requests[:WARM_UPS]:  # so that the clocks are those of the timed requests
            pipelines[arm].run(request)
        pipelines[arm].profile(requests[0])
        rows[arm] = {"walls_ms": walls[arm], "cold": cold[arm], "stages": pipelines[arm].record.to_dict()}
    return rows


def _joint_pass(pipeline: Flux3ActionPipeline, request: ActionRequest) -> dict[str, Any]:
    """One conditional pass of the transformer, eager and captured: 2,720 + 340 + 32 + 1 + text tokens."""
    denoising = next(stage for stage in pipeline.stages if isinstance(stage, Denoising))
    result = pipeline.run(request)
    outputs = result.outputs
    plan, tables = denoising._plan(request)
    del plan
    text = outputs["text_encoding.text"]
    transformer = denoising._transformer
    with torch.inference_mode():
        video, action = denoising.noise(0)
        streams = [
            transformer.embed_stream(
                "video", video.bfloat16(), tables[0].video.early, denoising._tables.rope("video")
            ),
            outputs["observation_encoding.video_cond"],
            transformer.embed_stream(
                denoising._tables.action,
                action.bfloat16(),
                tables[0].action.early,
                denoising._tables.rope(denoising._tables.action),
            ),
            outputs["observation_encoding.state_cond"],
        ]

        def run() -> Any:
            return denoising._joint_pass(text, streams, tables[0])

        for _ in range(5):
            run()
        eager = _walls(run)
        activity = profile_call(run, device=torch.device("cuda", 0))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        captured = _walls(graph.replay)
    assert activity is not None
    return {
        "tokens": sum(s.shape[1] for s in [text.tokens, *streams]),
        "eager_ms": statistics.median(eager),
        "gpu_busy_ms": activity.gpu_busy_ms,
        "launches": activity.launches,
        "captured_ms": statistics.median(captured),
    }


def _walls(run: Any) -> list[float]:
    walls = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begin) * 1e3)
    return walls


def _markdown(report: dict[str, Any]) -> str:
    device, software_ = report["device"], report["software"]
    joint = report["joint_pass"]
    lines = [
        "# FLUX 3 Action, full size, one request",
        "",
        f"{report['date']}. {_facts(device)}. {_facts(software_)}.",
        "Command: `python docs/benchmarks/flux3_action.py OUT_FOLDER`. Synthetic bf16 weights, DROID shapes,",
        "4 steps, guidance 4.0 / 1.0; every request encodes its prompt and the empty caption anew. "
        f"Medians of {len(report['arms']['eager']['walls_ms'])} requests, policies in turn A B B A in one process.",
        "",
        "| Policy | request p50 ms | p95 ms | speed-up | launches | GPU busy ms | wall / busy | extra MB "
        "| capture s | equal to eager |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    eager = percentile(report["arms"]["eager"]["walls_ms"], 50)
    for arm, row in report["arms"].items():
        p50, p95 = (percentile(row["walls_ms"], p) for p in (50, 95))
        launches = sum(stage["launches"] or 0 for stage in row["stages"])
        busy = sum(stage["gpu_busy_ms"] or 0 for stage in row["stages"])
        extra = sum(stage["extra_bytes"] for stage in row["stages"]) / 2**20
        capture = sum(stage["capture_ms"] for stage in row["cold"]) / 1e3
        lines.append(
            f"| {arm} | {p50:.1f} | {p95:.1f} | {eager / p50:.2f} | {launches:,} | {busy:.1f} "
            f"| {p50 / busy:.3f} | {extra:.0f} | {capture:.1f} | {_verdict(report['equality'].get(arm))} |"
        )
    lines += [
        "",
        "## By stage",
        "",
        "| Stage | Policy | p50 ms | launches | GPU busy ms | outcomes | sites |",
        "|---|---|---|---|---|---|---|",
    ]
    for index, stage in enumerate(report["arms"]["eager"]["stages"]):
        for arm, row in report["arms"].items():
            own = row["stages"][index]
            p50 = percentile(own["walls_ms"], 50)
            lines.append(
                f"| {stage['name']} | {arm} | {p50:.2f} | {own['launches']} | {own['gpu_busy_ms'] or 0:.2f} "
                f"| {_counts(own['outcomes'], 'kind')} | {_sites(row['cold'][index])} |"
            )
    lines += [
        "",
        f"One joint pass ({joint['tokens']} tokens): eager {joint['eager_ms']:.1f} ms, GPU busy "
        f"{joint['gpu_busy_ms']:.1f} ms in {joint['launches']:,} kernels, "
        f"captured {joint['captured_ms']:.1f} ms.",
        "",
    ]
    return "\n".join(lines)


def _facts(facts: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in dict(facts).items())


def _verdict(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    good = not row["differing"] and row["finite"]
    total = row["requests"] * row["outputs_each"]
    return f"yes, {total} outputs of {row['requests']} requests" if good else f"NO: {row['differing'][:2]}"


def _counts(outcomes: list[dict[str, Any]], key: str) -> str:
    return (
        ", ".join(
            f"{o['count']} {o[key]}"
            + (f" ({o['reason']}{': ' + o['detail'] if o['detail'] else ''})" if o["reason"] else "")
            for o in outcomes
        )
        or "-"
    )


def _sites(cold: dict[str, Any]) -> str:
    fused = sorted({s["site"] for s in cold["sites"] if s["fused"]})
    refused = sorted(
        {
            f"{s['site']} ({s['reason']})"
            for s in cold["sites"]
            if not s["fused"] and s["reason"] != "disabled"
        }
    )
    return ", ".join(fused + refused) or "-"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
