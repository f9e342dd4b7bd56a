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

from cuda_command import out_folder
from flux3_tables import markdown
from provenance import provenance

from accel.fusion.compare import first_mismatch
from accel.fusion.scope import fusion_scope
from accel.graphs.tree import distinct_tensors
from accel.measure.profile import profile_call
from accel.site_names import SITE_NAMES
from pipelines.flux3_action.denoising import Conditioning, Denoising
from pipelines.flux3_action.observation import parse_observation
from pipelines.flux3_action.observation_files import load_episode_frame
from pipelines.flux3_action.pipeline import Flux3ActionPipeline
from pipelines.flux3_action.request import ActionRequest
from pipelines.flux3_action.weights import load_components
from pipelines.pipeline import Placement
from pipelines.weights_config import WeightsConfig
from tasks.config import compose

ROOT = Path(__file__).resolve().parents[2]
ARMS = {
    "eager": ("accel=eager",),
    "graph, loop=step": ("accel=graph", "accel.loop=step"),
    "graph, loop=chain": ("accel=graph", "accel.loop=chain"),
    "graph": ("accel=graph",),
    "segmented": ("accel=segmented",),
    "fused": ("accel=fused",),
    "graph+fused": ("accel=graph+fused",),
}
PROMPTS = ("lift the red cube", "put the cube into the bowl", "open the drawer", "push it to the left", "")
WARM_UPS, ROUNDS = 3, 6


def main() -> None:
    out = out_folder(__doc__)
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
        **provenance(device),
        "load_s": time.perf_counter() - started,
    }
    pipelines = {
        arm: Flux3ActionPipeline(
            components,
            policy=compose(*overrides).accel,
            placement=placement,
            outputs_mean_nothing=True,
            caption_cache_tokens=0,
        )
        for arm, overrides in ARMS.items()
    }
    requests = [_request(pipelines["eager"], index) for index in range(20)]
    report["equality"] = _equality(pipelines, requests)
    print(json.dumps(report["equality"], indent=1), flush=True)
    report["arms"] = _timing(pipelines, requests)
    report["joint_pass"] = {
        arm: _joint_pass(pipelines["eager"], requests[0], fused=fused)
        for arm, fused in (("eager", frozenset[str]()), ("fused", frozenset(SITE_NAMES)))
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "flux3_action.json").write_text(json.dumps(report, indent=1))
    (out / "flux3_action.md").write_text(markdown(report))
    print(markdown(report))


def _request(pipeline: Flux3ActionPipeline, index: int) -> ActionRequest:
    raw = dict(load_episode_frame(ROOT / "data" / "panda_lift", 3 * index))
    raw["prompt"] = PROMPTS[index % len(PROMPTS)]
    return pipeline.request(parse_observation(raw, pipeline.config), seed=index)


def _equality(pipelines: dict[str, Flux3ActionPipeline], requests: list[ActionRequest]) -> dict[str, Any]:
    """Every stage output of every request against eager's, down to the bit."""
    rows: dict[str, Any] = {}
    expected = [pipelines["eager"].run(request) for request in requests]
    for arm in list(ARMS)[1:]:
        differing = []
        finite = True
        for index, (request, eager) in enumerate(zip(requests, expected, strict=True)):
            result = pipelines[arm].run(request)
            finite &= bool(torch.isfinite(torch.from_numpy(result.actions)).all())
            for name, value in result.outputs.items():
                mismatch = first_mismatch(distinct_tensors(eager.outputs[name]), distinct_tensors(value))
                if mismatch is not None:
                    differing.append(f"request {index}, {name}: {mismatch}")
        rows[arm] = {
            "requests": len(requests),
            "outputs_each": len(expected[0].outputs),
            "differing": differing,
            "finite": finite,
        }
    return rows


def _timing(pipelines: dict[str, Flux3ActionPipeline], requests: list[ActionRequest]) -> dict[str, Any]:
    cold = {arm: pipelines[arm].record.to_dict() for arm in ARMS}
    walls: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        for request in requests[:WARM_UPS]:
            pipelines[arm].run(request)
        pipelines[arm].new_record()
    for turn in range(ROUNDS):
        for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
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


def _joint_pass(
    pipeline: Flux3ActionPipeline, request: ActionRequest, *, fused: frozenset[str]
) -> dict[str, Any]:
    """One conditional pass of the transformer: 2,720 + 340 + 32 + 1 + text tokens.

    fused: sites allowed to fuse.
    """
    denoising = next(stage for stage in pipeline.stages if isinstance(stage, Denoising))
    outputs = pipeline.run(request).outputs
    conditioning = Conditioning(
        outputs["text_encoding.text"],
        outputs["text_encoding.null_text"],
        outputs["observation_encoding.video_cond"],
        outputs["observation_encoding.state_cond"],
    )
    with torch.inference_mode(), fusion_scope(fused, lambda outcome: None):
        table = denoising.steps(request)[0].table
        streams = denoising.streams(denoising.start(request).targets, conditioning)

        def run() -> Any:
            return denoising.joint_pass(conditioning.text, streams, table)

        for _ in range(5):
            run()
        launched = _walls(run)
        activity = profile_call(run, device=torch.device("cuda", 0))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        captured = _walls(graph.replay)
    assert activity is not None
    return {
        "tokens": sum(s.shape[1] for s in [conditioning.text.tokens, *streams]),
        "launched_ms": statistics.median(launched),
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


if __name__ == "__main__":
    main()
