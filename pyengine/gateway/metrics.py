"""Prometheus text for /metrics: the gateway's own counters and histograms, merged with the cluster's counters.

Names are vLLM's where it has one, so that existing dashboards work; others begin with pyengine_.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

#: Upper bounds in seconds, 1-2-5 steps: from one step of a small model on a GPU to a queue of minutes.
TTFT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
GAP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
REQUEST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class Histogram:
    """Counts of values per bucket (upper bounds, cumulative when rendered)."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def samples(self, name: str, labels: str) -> list[str]:
        lines = []
        total = 0
        for bound, count in zip([*(f"{bound:g}" for bound in self._buckets), "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self._sum!r}", f"{name}_count{{{labels}}} {total}"]


class ModelMetrics:
    """What the gateway measures of one model."""

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BUCKETS)
        #: Of that, for how long the first token was there and held for the second.
        self.held = Histogram(GAP_BUCKETS)
        self.second_gap = Histogram(GAP_BUCKETS)
        self.gap = Histogram(GAP_BUCKETS)
        self.duration = Histogram(REQUEST_BUCKETS)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.retries = 0
        self.finished: dict[str, int] = {}

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1


class Metrics:
    """All models of one gateway. Label values come from workers' model names, so their number is the cluster's."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        known = self._models.get(model)
        return known if known is not None else self._models.setdefault(model, ModelMetrics())

    def render(self, cluster: Mapping[str, float], running: Mapping[str, int], waiting: Mapping[str, int]) -> bytes:
        """cluster: counters by sample name with labels. running, waiting: requests of this gateway by model."""
        families: dict[str, tuple[str, list[str]]] = {}

        def put(name: str, kind: str, *lines: str) -> None:
            families.setdefault(name, (kind, []))[1].extend(lines)

        for model in sorted({*self._models, *running, *waiting}):
            m = self.of(model)
            labels = f'model_name="{escape(model)}"'
            # Not vLLM's num_requests_*: those are the workers', and a sum over both would count requests twice.
            for state, counts in (("running", running), ("waiting", waiting)):
                sample = f'pyengine_gateway_requests{{{labels},state="{state}"}} {counts.get(model, 0)}'
                put("pyengine_gateway_requests", "gauge", sample)
            for name, value in (
                ("vllm:prompt_tokens", m.prompt_tokens),
                ("vllm:prompt_tokens_cached", m.cached_tokens),
                ("vllm:generation_tokens", m.generated_tokens),
                ("pyengine_request_retries", m.retries),
            ):
                put(f"{name}_total", "counter", f"{name}_total{{{labels}}} {value}")
            for reason, count in sorted(m.finished.items()):
                name = (
                    "vllm:request_success_total" if reason in ("stop", "length") else "pyengine_request_failures_total"
                )
                put(name, "counter", f'{name}{{{labels},finished_reason="{reason}"}} {count}')
            for name, histogram in (
                ("vllm:time_to_first_token_seconds", m.ttft),
                ("pyengine_first_token_held_seconds", m.held),
                ("pyengine_second_token_gap_seconds", m.second_gap),
                ("vllm:inter_token_latency_seconds", m.gap),
                ("vllm:e2e_request_latency_seconds", m.duration),
            ):
                put(name, "histogram", *histogram.samples(name, labels))
        for sample in sorted(cluster):
            name = sample.partition("{")[0]
            number = cluster[sample]
            text = str(int(number)) if float(number).is_integer() else repr(float(number))
            put(name, "counter" if name.endswith("_total") else "gauge", f"{sample} {text}")
        lines = []
        for name, (kind, samples) in families.items():
            lines += [f"# TYPE {name} {kind}", *samples]
        return ("\n".join(lines) + "\n").encode()


def escape(value: str) -> str:
    """A label value in the text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
