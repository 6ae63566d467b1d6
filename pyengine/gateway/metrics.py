"""Prometheus text for /metrics: the gateway's own counters and histograms, merged with the cluster's counters.

What each family is stands in catalog.py. Format: Prometheus' text exposition format 0.0.4.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pyengine.gateway import timing
from pyengine.gateway.catalog import ALIASES, FAMILIES
from pyengine.gateway.request import Request
from pyengine.scheduler.types import WorkerInfo

#: Samples (name with labels) and their values, by the family that they are of.
Families: TypeAlias = dict[str, dict[str, float]]
#: What says that an answer is whole; all else is a failure.
WHOLE = ("stop", "length", "tool_calls")


class Histogram:
    """Counts of values per bucket (upper bounds, cumulative when rendered)."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def samples(self, name: str, labels: str) -> dict[str, float]:
        samples: dict[str, float] = {}
        total = 0
        for bound, count in zip([*map(_bound, self._buckets), "+Inf"], self._counts, strict=True):
            total += count
            samples[f'{name}_bucket{{{labels},le="{bound}"}}'] = total
        return samples | {f"{name}_sum{{{labels}}}": self._sum, f"{name}_count{{{labels}}}": total}


class ModelMetrics:
    """What the gateway measures of one model."""

    def __init__(self) -> None:
        self.ttft = self._of("vllm:time_to_first_token_seconds")
        #: Of that, for how long the first token was there and held for the second.
        self.held = self._of("pyengine_first_token_held_seconds")
        self.second_gap = self._of("pyengine_second_token_gap_seconds")
        self.gap = self._of("vllm:inter_token_latency_seconds")
        self.histograms = {
            "vllm:time_to_first_token_seconds": self.ttft,
            "vllm:inter_token_latency_seconds": self.gap,
            "pyengine_first_token_held_seconds": self.held,
            "pyengine_second_token_gap_seconds": self.second_gap,
        }
        for name, family in FAMILIES.items():
            if family.kind == "histogram" and "part" not in family.labels and name not in ALIASES:
                self.histograms.setdefault(name, self._of(name))
        #: By family and part.
        self.parts: dict[tuple[str, str], Histogram] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.retries = 0
        self.finished: dict[str, int] = {}

    @staticmethod
    def _of(name: str) -> Histogram:
        return Histogram(FAMILIES[name].buckets)

    def observe(self, name: str, value: float) -> None:
        """One value of a family without parts."""
        self.histograms[name].observe(value)

    def observe_part(self, name: str, part: str, value: float) -> None:
        histogram = self.parts.get((name, part))
        if histogram is None:
            histogram = self.parts[name, part] = self._of(name)
        histogram.observe(value)

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def ended(self, request: Request, last: float, now: float) -> None:
        """One answer has ended; its last token came at `last` (seconds, monotonic)."""
        self.observe("vllm:e2e_request_latency_seconds", now - request.arrived)
        self.observe("vllm:request_prompt_tokens", len(request.prompt))
        self.observe("vllm:request_generation_tokens", len(request.tokens))
        self.observe("vllm:request_params_max_tokens", request.sampling.max_tokens)
        parts = timing.parts(request)
        if not parts:
            return
        for part in timing.FIRST_TOKEN_PARTS:
            if part in parts:
                self.observe_part("pyengine_first_token_seconds", part, parts[part])
        # What vLLM calls queued is here at the conductor and at the worker.
        queue = parts["schedule"] + parts.get("queue", 0.0)
        prefill = request.came - request.arrived - parts["tokenize"] - queue
        decode = max(last - request.came, 0.0)
        self.observe("vllm:request_queue_time_seconds", queue)
        self.observe("vllm:request_prefill_time_seconds", max(prefill, 0.0))
        self.observe("vllm:request_decode_time_seconds", decode)
        self.observe("vllm:request_inference_time_seconds", max(prefill, 0.0) + decode)
        if len(request.tokens) > 1:
            self.observe("vllm:request_time_per_output_token_seconds", decode / (len(request.tokens) - 1))
        if request.handoff is not None:
            for part in request.handoff.__struct_fields__:
                self.observe_part("pyengine_handoff_seconds", part, getattr(request.handoff, part))
            if not math.isnan(request.second):
                self.observe_part("pyengine_handoff_seconds", "all", request.second - request.came)


class Metrics:
    """All models of one gateway. Label values come from workers' model names, so their number is the cluster's."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        known = self._models.get(model)
        return known if known is not None else self._models.setdefault(model, ModelMetrics())

    def families(self, running: Mapping[str, int], waiting: Mapping[str, int]) -> Families:
        """All samples of this gateway. running, waiting: its requests by model."""
        families: Families = {}

        def put(name: str, samples: Mapping[str, float]) -> None:
            families.setdefault(name, {}).update(samples)

        for model in sorted({*self._models, *running, *waiting}):
            m = self.of(model)
            labels = f'model_name="{escape(model)}"'
            # Not vLLM's num_requests_*: those are the workers', and a sum over both would count requests twice.
            for state, counts in (("running", running), ("waiting", waiting)):
                sample = f'pyengine_gateway_requests{{{labels},state="{state}"}}'
                put("pyengine_gateway_requests", {sample: counts.get(model, 0)})
            for name, value in (
                ("vllm:prompt_tokens_total", m.prompt_tokens),
                ("vllm:prompt_tokens_cached_total", m.cached_tokens),
                ("vllm:generation_tokens_total", m.generated_tokens),
                ("pyengine_request_retries_total", m.retries),
            ):
                put(name, {f"{name}{{{labels}}}": value})
            for reason, count in sorted(m.finished.items()):
                name = "vllm:request_success_total" if reason in WHOLE else "pyengine_request_failures_total"
                put(name, {f'{name}{{{labels},finished_reason="{reason}"}}': count})
            for name, histogram in m.histograms.items():
                put(name, histogram.samples(name, labels))
            for (name, part), histogram in sorted(m.parts.items()):
                put(name, histogram.samples(name, f'{labels},part="{part}"'))
        return families

    def render(
        self,
        cluster: Mapping[str, float],
        running: Mapping[str, int],
        waiting: Mapping[str, int],
        workers: Sequence[WorkerInfo] = (),
    ) -> bytes:
        """The text of a gateway that is alone (see `exposition`)."""
        return exposition(self.families(running, waiting), cluster, workers)


def summed(one: Families, other: Families) -> Families:
    """Samples of both; those of one name are added."""
    families = {name: dict(samples) for name, samples in one.items()}
    for name, samples in other.items():
        mine = families.setdefault(name, {})
        for sample, value in samples.items():
            mine[sample] = mine.get(sample, 0) + value
    return families


def counters(families: Families) -> Families:
    """Without what says how things are at the moment."""
    return {name: samples for name, samples in families.items() if not _is_gauge(name)}


def _is_gauge(name: str) -> bool:
    return name in FAMILIES and FAMILIES[name].kind == "gauge"


def exposition(own: Families, cluster: Mapping[str, float], workers: Sequence[WorkerInfo] = ()) -> bytes:
    """Text for /metrics. own: the gateways' samples. cluster: counters by sample name with labels."""
    families: dict[str, list[str]] = {}
    for name, samples in own.items():
        families[name] = [f"{sample} {value!r}" for sample, value in samples.items()]
    for worker in workers:
        labels = f'model_name="{escape(worker.model)}",worker="{escape(worker.worker)}"'
        sizes = f'block_size="{worker.namespace.kv.block_tokens}",num_gpu_blocks="{worker.pages}"'
        lines = families.setdefault("vllm:cache_config_info", [])
        lines.append(f"vllm:cache_config_info{{{labels},{sizes}}} 1")
    for sample in sorted(cluster):
        number = cluster[sample]
        text = str(int(number)) if float(number).is_integer() else repr(float(number))
        families.setdefault(sample.partition("{")[0], []).append(f"{sample} {text}")
    for old, new in ALIASES.items():
        families.setdefault(old, []).extend(old + line.removeprefix(new) for line in families.get(new, ()))
    lines = []
    for name, samples_of in families.items():
        if samples_of:
            lines += [*_head(name), *samples_of]
    return ("\n".join(lines) + "\n").encode()


def _bound(value: float) -> str:
    """As Prometheus' own clients write it: sums over servers match these labels as texts."""
    return f"{value:g}" if value >= 1e6 else repr(value)


def _head(name: str) -> list[str]:
    """What stands above a family's samples. One that nobody has described may come from a later worker."""
    family = FAMILIES.get(name)
    if family is None:
        return [f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"]
    text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {name} {text}", f"# TYPE {name} {family.kind}"]


def escape(value: str) -> str:
    """A label value in the text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
