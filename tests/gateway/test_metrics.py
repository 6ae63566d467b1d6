"""Goal: what /metrics says is what Prometheus reads, every name is described and documented, and the dashboard asks for
nothing that is not there. Method: prometheus_client's parser as the reader; a gateway with scripted workers, and a
real worker for what workers send.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyengine.gateway import catalog
from pyengine.gateway.metrics import Metrics
from pyengine.scheduler.messages import Handoff, PrefillReport
from pyengine.scheduler.types import FinishReason, Role
from pyengine.worker.service import sample_names
from tests.gateway.cluster import Cluster, FakeWorker, cluster, tokens
from tests.worker.harness import Cluster as Workers
from tests.worker.test_worker import backend

ROOT = Path(__file__).parents[2]
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
#: What vLLM's own Grafana dashboard and llm-d's endpoint picker ask for.
SCRAPED = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:e2e_request_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_success",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:cache_config_info",
}


def timed(worker: FakeWorker, identity: bytes, work) -> None:  # type: ignore[no-untyped-def]
    """Answers with made-up times."""
    if work.part == "prefill":
        report = PrefillReport(
            request=work.request, attempt=work.attempt, cached=0, computed=2, queued=0.25, loading=0.5, computing=2.0
        )
        worker.send(identity, report, tokens(work, 0, 1))
    else:
        rest = tokens(work, 1, work.sampling.max_tokens - 1, FinishReason.LENGTH)
        fields = {name: getattr(rest, name) for name in rest.__struct_fields__}
        worker.send(identity, type(rest)(**{**fields, "handoff": Handoff(0.5, 3.0, 0.125, 0.0625)}))


async def scraped(at: Cluster, http: aiohttp.ClientSession) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Samples by family. The reader refuses text that is none."""
    async with http.get(f"{at.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        described = catalog.FAMILIES.get(family.name) or catalog.FAMILIES.get(f"{family.name}_total")
        assert described is not None, family.name
        assert (family.type, family.documentation) == (described.kind, described.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(described.labels), sample
        assert family.name not in found, "each family stands once"
        found[family.name] = [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return found


async def test_prometheus_reads_what_a_request_took(tmp_path: Path) -> None:
    async with cluster(tmp_path, Role.PREFILL, Role.DECODE) as at, aiohttp.ClientSession() as http:
        # What a real worker sends stands beside what the scripted ones do.
        with Workers() as real:
            real.add_node("a", 8, backend())
            sent = sample_names("decode-0", real.add_worker("decode-0", "a", backend()))
        counters = sent | {'pyengine_pool_blocks{node="node-0",tier="dram",state="free"}': 3.0}
        for worker in at.workers.values():
            worker.script = timed
        async with http.post(f"{at.url}/v1/chat/completions", json={**CHAT, "max_tokens": 5}) as response:
            assert response.status == 200, await response.text()
        at.service.cluster = type(at.service.cluster)(workers=at.service.cluster.workers, counters=counters)
        found = await scraped(at, http)

    def value(family: str, suffix: str, **labels: str) -> float:
        (only,) = [
            number
            for name, has, number in found[family]
            if name == family + suffix and all(has.get(key) == wanted for key, wanted in labels.items())
        ]
        return only

    assert set(found) >= SCRAPED, SCRAPED - set(found)
    for part, seconds in (("queue", 0.25), ("load", 0.5), ("prefill", 2.0)):
        assert value("pyengine_first_token_seconds", "_sum", part=part) == seconds
    for part, seconds in (("waited", 0.5), ("arriving", 3.0), ("loading", 0.125), ("computing", 0.0625)):
        assert value("pyengine_handoff_seconds", "_sum", part=part) == seconds
    assert value("pyengine_handoff_seconds", "_count", part="all") == 1
    assert value("vllm:request_generation_tokens", "_sum") == 5
    assert value("vllm:request_params_max_tokens", "_bucket", le="5.0") == 1
    assert value("vllm:request_params_max_tokens", "_bucket", le="2.0") == 0
    assert value("vllm:request_params_n", "_sum") == value("vllm:request_params_n", "_count") == 1
    assert value("vllm:request_success", "_total", finished_reason="length") == 1
    assert value("vllm:cache_config_info", "", worker="prefill-0", block_size="16", num_gpu_blocks="64") == 1
    inference = sum(value(f"vllm:request_{part}_time_seconds", "_sum") for part in ("prefill", "decode"))
    assert math.isclose(value("vllm:request_inference_time_seconds", "_sum"), inference)
    for old, new in catalog.ALIASES.items():
        old, new = old.removesuffix("_total"), new.removesuffix("_total")
        assert [sample[1:] for sample in found[old]] == [sample[1:] for sample in found[new]] != []


def test_who_is_not_described_is_shown_all_the_same() -> None:
    text = Metrics().render({'pyengine_later_total{worker="a"}': 2.0}, {}, {}).decode()
    (family,) = text_string_to_metric_families(text)
    assert (family.name, family.type, family.samples[0].value) == ("pyengine_later", "counter", 2.0)


@pytest.mark.parametrize("folder", ["pyengine", "scheduler", "rust/transfer/src"])
def test_every_name_in_the_code_is_described(folder: str) -> None:
    """Names of the engine that embeds in other processes are shown by it only, a daemon's own by its own /metrics."""
    own = re.compile(r"pyengine_(engine|daemon)_|pyengine_unheard_of")
    known = {*catalog.FAMILIES, *(name.removesuffix("_total") for name in catalog.FAMILIES)}
    found = 0
    for file in sorted((ROOT / folder).rglob("*.rs" if folder.startswith("rust") else "*.py")):
        if folder == "pyengine" and "scheduler" in file.parts:
            continue
        for name in re.findall(r"""["'](?:{name}|)((?:pyengine_|vllm:)[a-z_0-9]+)["'{\[]""", file.read_text()):
            if not own.match(name) and not name.endswith("_"):
                found += 1
                assert name in known, f"{file}: {name} is not in pyengine/gateway/catalog.py"
    assert found > 5


def test_the_page_is_made_of_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == catalog.document(), "run: python -m pyengine.gateway.catalog > docs/metrics.md"


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Every series it names exists, with the labels that it chooses by; panels do not overlap and have an id each."""
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    assert board["uid"] and board["schemaVersion"] >= 39 and board["title"]
    queries = [query["expr"] for panel in board["panels"] for query in panel.get("targets", ())]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"((?:pyengine_|vllm:)[a-z_0-9]+)(\{[^}]*\})?", query)
        assert names, query
        for name, chosen in names:
            family = catalog.FAMILIES.get(name)
            if family is None:
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                family = catalog.FAMILIES[base]
                assert family.kind == "histogram", query
            assert family.kind != "counter" or name.endswith("_total")
            for label in re.findall(r"(\w+)=~?\"", chosen):
                assert label in family.labels, query
            for grouped in re.findall(r"by \(([^)]*)\)", query):
                labels = {label.strip() for label in grouped.split(",")} - {"le"}
                assert any(
                    labels <= set(catalog.FAMILIES[re.sub(r"_(bucket|sum|count)$", "", one)].labels) for one, _ in names
                ), query
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["fieldConfig"]["defaults"]["unit"])
