"""Goal: the commands over the simulator and over a live cluster, as users run them. Method: the repository's own trace
on a small cluster; real processes of the fake model for what is live.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

import msgspec
import pytest

from pyengine.scheduler.report.fidelity import gaps
from pyengine.scheduler.report.summary import Spread, summarize
from pyengine.scheduler.sim.gateway import RequestModel
from pyengine.scheduler.sim.specfile import load_cluster
from pyengine.scheduler.types import Role, Slo
from tests.system.conftest import FAKE_SLOW, fake_server

from ..report.records import records, report
from .conftest import Conductor, install

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "conductor.md"
GENERATED = ("--trace", "generated", "--limit", "60", "--cluster", "small")


def test_the_same_seed_has_the_same_digest_and_another_has_not(conductor: Conductor) -> None:
    digests = []
    for seed in (1, 1, 2):
        called = conductor("simulate", *GENERATED, "--seed", seed)
        assert called.status == 0, called.err
        digests += re.findall(r"^digest: (\S+)$", called.out, re.MULTILINE)
    assert len(digests) == 3 and digests[0] == digests[1] != digests[2]


def test_a_report_names_all_that_is_needed_to_repeat_it(conductor: Conductor, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    conductor("simulate", *GENERATED, "--policy", "least-loaded", "--seed", 5, "--json", file)
    facts = json.loads(file.read_text())["provenance"]
    assert "first 60 requests" in facts["trace"] and "seed 5" in facts["trace"]
    assert (facts["policy"], facts["admission"], facts["seed"], facts["backend"]) == ("least-loaded", "none", 5, "sim")
    assert facts["version"] and "simulated" in facts["fidelity"] and facts["cost models"]["llama3-70b-a800"]["source"]
    assert [worker["count"] for worker in facts["cluster"]["workers"]] == [2, 2]


def test_a_cluster_that_cannot_be_is_refused(conductor: Conductor, tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    for text, complaint in (
        ('[[workers]]\nrole = "prefill"\ncount = 2\n', "0 decode workers"),
        ('[[workers]]\nrole = "both"\ncount = 2\n[node]\nlink_rate = 0\n', "node.link_rate must be above 0"),
    ):
        path.write_text(text)
        called = conductor("simulate", "--trace", "generated", "--limit", 5, "--cluster", path)
        assert called.status == 2 and complaint in called.err and str(path) in called.err


def test_more_nodes_never_hurt_in_a_plan(conductor: Conductor, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    called = conductor("plan", *GENERATED, "--speed", 2, "--ttft", 1, "--tbt", 0.07, "--nodes-max", 16, "--json", file)
    found = json.loads(file.read_text())
    assert called.status == 0, called.out
    best = found["best"]
    assert best["share"] >= 0.95

    def nodes(point: dict[str, int]) -> int:
        return point["prefill"] + point["decode"] + point["both"]

    cheaper = [point for point in found["tried"] if nodes(point) < nodes(best)]
    assert cheaper and all(point["share"] < 0.95 for point in cheaper)
    assert any(point["both"] for point in found["tried"])


def test_a_simulated_decision_is_explained(conductor: Conductor, tmp_path: Path) -> None:
    file = tmp_path / "why.json"
    called = conductor("explain", *GENERATED, "--request", 40, "--json", file)
    assert called.status == 0, called.err
    found = json.loads(file.read_text())
    assert found["request"] == 40 and len(found["candidates"]) == 4
    assert found["prefill"] in called.out and "chosen: " in called.out
    late = conductor("explain", *GENERATED, "--request", 60)
    assert late.status == 2 and "the trace has no request 60: its last is 59" in late.err


def test_a_policy_that_fails_is_named_and_is_no_success(conductor: Conductor) -> None:
    says = "requests were refused: the policy 'failing' failed: ZeroDivisionError: no choice"
    called = conductor("simulate", *GENERATED, "--policy", "failing")
    assert called.status == 1 and f"note: 60 {says}" in called.out
    called = conductor("compare", *GENERATED, "--policies", "random,failing", "--seeds", 1, "--jobs", 1)
    assert called.status == 1 and f"note: 60 {says}" in called.out
    called = conductor("plan", *GENERATED, "--policy", "failing", "--ttft", 1, "--tbt", 1)
    assert called.status == 2 and called.err == f"conductor plan: error: 1P1D cannot be judged: 60 {says}\n"


def test_the_policy_of_the_documentation_is_one_file_and_one_entry_point(
    conductor: Conductor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As somebody else would add it: what stands in docs/conductor.md, word by word."""
    chapter = DOCUMENTATION.read_text().partition("## Adding a policy\n")[2].partition("\n## ")[0]
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", chapter, re.DOTALL))
    (group,) = tomllib.loads(blocks["toml"])["project"]["entry-points"].items()
    ((name, where),) = group[1].items()
    (tmp_path / "my_package.py").write_text(blocks["python"])
    install(tmp_path, name, where, group[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    called = conductor("simulate", *GENERATED, "--policy", "fewest-tokens:queue=0.5")
    assert called.status == 0 and re.search("^done +60$", called.out, re.MULTILINE), called.out + called.err
    explained = conductor("explain", *GENERATED, "--policy", "fewest-tokens", "--request", 40)
    assert explained.status == 0 and "left" in explained.out


def test_an_explanation_that_is_interrupted_says_no_more(conductor: Conductor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestModel, "start", interrupt)
    called = conductor("explain", *GENERATED, "--request", 40)
    assert (called.status, called.out, called.err) == (130, "", "conductor explain: stopped\n")


def test_a_live_cluster_is_replayed_simulated_and_explained(conductor: Conductor, tmp_path: Path) -> None:
    """Ten seconds of the trace on one prefill and one decode worker; then why its last request went there."""
    trace = tmp_path / "short.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 520 + i, "output_length": 8, "hash_ids": [i % 3, 1000 + i]}
        for i in range(20)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file, saved = tmp_path / "replay.json", tmp_path / "cluster.toml"
    state = tmp_path / "state"
    flags = ("--nodes", "2", "--prefill", "1", "--decode", "1", "--policy", "least-loaded")
    with (
        TemporaryDirectory(prefix="rt-") as short,
        fake_server(state, *flags, model=FAKE_SLOW, environment={"XDG_RUNTIME_DIR": short}) as server,
    ):
        arguments = ("--trace", trace, "--url", server.base, "--save-cluster", saved, "--json", file)
        called = conductor("replay", *arguments, "--ttft", 5, "--tbt", 1)
        assert called.status == 0, called.err
        (socket,) = Path(short).glob("pyengine-*/conductor")
        endpoint = f"ipc://{socket}"
        explained = conductor("explain", "--conductor", endpoint, "--state-dir", state)
        assert explained.status == 0 and "policy least-loaded" in explained.out, explained.err
        unknown = conductor("explain", "--conductor", endpoint, "--state-dir", state, "--request", 10**9)
        assert unknown.status == 1 and "does not remember request 1000000000" in unknown.out
        text = tmp_path / "prompt.txt"
        text.write_text("What has been said once, is held by somebody. " * 20)
        body = json.dumps({"model": "fake", "prompt": text.read_text(), "max_tokens": 4}).encode()
        sent = Request(f"{server.base}/v1/completions", body, {"content-type": "application/json"})
        with urlopen(sent) as response:
            json.load(response)
        asked = ("explain", "--conductor", endpoint, "--state-dir", state, "--json", tmp_path / "unsent.json")
        unsent = conductor(*asked, "--prompt-file", text, "--ttft", 5)
        assert unsent.status == 0 and "a request that nobody has sent" in unsent.out, unsent.err
        held = json.loads((tmp_path / "unsent.json").read_text())
        assert held["best"] == held["blocks"] > 0 and held["prefill"].startswith("prefill"), held
        unsent = conductor(*asked, "--tokens", 1500)
        assert unsent.status == 0, unsent.err
        new = json.loads((tmp_path / "unsent.json").read_text())
        assert (new["best"], new["prompt_tokens"], new["refused"]) == (0, 1500, "")
        assert new["predicted_ttft"] > held["predicted_ttft"] > 0
        other = conductor(*asked, "--tokens", 10, "--model", "fale")
        assert other.status == 2 and "did you mean 'fake'?" in other.err
    found = json.loads(file.read_text())
    assert found["complete"] and found["live"]["summary"]["done"] == found["simulated"]["summary"]["done"] == 20
    assert found["simulated"]["provenance"]["policy"] == "least-loaded"
    assert {gap["name"] for gap in found["differences"]} >= {"ttft p50", "tbt p99", "goodput"}
    assert found["live"]["summary"]["hit"] > 0.5
    assert found["live"]["summary"]["hit"] == pytest.approx(found["simulated"]["summary"]["hit"], abs=0.1)
    assert "p90" in called.out and "note: simulated with links: " in called.out
    spec = load_cluster(str(saved))
    assert [worker.role for worker in spec.workers] == [Role.DECODE, Role.PREFILL]


def test_gaps_are_relative_to_what_was_measured() -> None:
    base = summarize(report(records(30)), Slo())
    live = msgspec.structs.replace(base, ttft=Spread(3, 1.0, 0.5, 1.0, 2.0, 4.0, 4.0), goodput=2.0, hit=0.0)
    simulated = msgspec.structs.replace(base, ttft=Spread(3, 1.1, 0.5, 0.9, 2.0, None, None), goodput=1.0)
    found = {gap.name: gap.relative for gap in gaps(live, simulated)}
    assert found["ttft mean"] == pytest.approx(0.1) and found["ttft p50"] == pytest.approx(-0.1)
    assert found["goodput"] == pytest.approx(-0.5)
    assert found["ttft p99"] is None and found["hit"] is None
