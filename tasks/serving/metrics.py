"""What /metrics tells Prometheus. Names and labels are listed in docs/serving.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tasks.serving.policy import RegionCalls

# Seconds; a stage takes from a tenth of a millisecond on a GPU to seconds on a CPU.
_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counts and times of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "samebit_requests",
            "Requests by protocol and outcome: ok, gone, or why there were no actions.",
            ("protocol", "outcome"),
            registry=self._registry,
        )
        self._stages = Histogram(
            "samebit_stage_seconds",
            "Time that answered requests spent in each stage.",
            ("stage",),
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def outcome(self, protocol: str, outcome: str) -> None:
        self._requests.labels(protocol, outcome).inc()

    def stage_times(self, times_ms: Mapping[str, float]) -> None:
        """times_ms: stage -> milliseconds; a suffix `_ms` of the stage's name is dropped."""
        for name, value in times_ms.items():
            self._stages.labels(name.removesuffix("_ms")).observe(value / 1e3)

    def watch(self, *, queue_depth: Callable[[], int], regions: Callable[[], Iterable[RegionCalls]]) -> None:
        """Read these whenever the metrics are asked for."""
        self._registry.register(_Observed(queue_depth, regions))

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _Observed(Collector):
    def __init__(self, queue_depth: Callable[[], int], regions: Callable[[], Iterable[RegionCalls]]) -> None:
        self._queue_depth = queue_depth
        self._regions = regions

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield GaugeMetricFamily("samebit_queue_depth", "Requests that wait.", value=self._queue_depth())
        regions = CounterMetricFamily(
            "samebit_region_calls",
            "Calls of graphable regions: replayed is a graph hit; captured and eager are misses.",
            labels=("stage", "outcome", "reason"),
        )
        for row in self._regions():
            regions.add_metric((row.stage, row.outcome, row.reason), row.count)
        yield regions
