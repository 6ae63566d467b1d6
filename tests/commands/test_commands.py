"""Goal: the commands do what their help says, with any backend. Method: called in this process over the null backend,
whose answers are known beforehand; what a simulation says is tested with the simulator.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pyengine.scheduler import cli
from pyengine.scheduler.commands import compare as compare_module
from pyengine.scheduler.commands.contenders import contenders
from pyengine.scheduler.commands.guard import InputError
from pyengine.scheduler.report.summary import summarize
from pyengine.scheduler.types import Slo

from ..report.records import records, report
from .conftest import Conductor, install


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")
def test_help_tells_what_each_command_is_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list has a sentence of each; a command's own help has all that its statuses mean."""
    said = {
        ("--help",): "Finds the cheapest cluster",
        ("plan", "--help"): "Ends with 1 if no cluster up to the largest does",
        ("simulate", "--help"): "exit status 130",
    }
    for arguments, sentence in said.items():
        monkeypatch.setattr(sys, "argv", ["conductor", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert sentence in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_simulate_reports_as_text_json_and_picture(conductor: Conductor, trace: Path, tmp_path: Path) -> None:
    file, picture = tmp_path / "report.json", tmp_path / "report.png"
    called = conductor(
        "simulate", "--trace", trace, "--cluster", "small", "--backend", "null:seconds=0.25", "--seed", 4,
        "--json", file, "--plot", picture,
    )  # fmt: skip
    assert called.status == 0 and called.err == ""
    for wanted in (trace.name, "seed", "kvcache-centric", "fidelity", "version", "30", "TTFT 10.0 s, TBT 100 ms"):
        assert wanted in called.out, called.out
    found = json.loads(file.read_text())
    assert found["complete"] and found["summary"]["requests"] == 30 and found["summary"]["effective"] == 1.0
    assert found["provenance"]["seed"] == 4 and found["records"]["ttft"] == [0.25] * 30
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("where", ["closed", "/dev/full"])
def test_files_are_written_where_nobody_reads_the_report(
    where: str, conductor: Conductor, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`conductor simulate --json FILE | head -1`; and a disk that is full."""
    file = tmp_path / "report.json"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") if where == "closed" else Path(where).open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        called = conductor("simulate", "--trace", trace, "--backend", "null", "--json", file)
    reason = "Broken pipe" if where == "closed" else "No space left on device"
    assert called.err == f"conductor simulate: error: cannot write the report to stdout: {reason}\n"
    assert called.status == 2 and json.loads(file.read_text())["complete"]


def test_objectives_on_the_command_line_replace_the_file_s(conductor: Conductor, trace: Path, tmp_path: Path) -> None:
    for ttft, share in ((0.6, 1.0), (0.4, 0.0)):
        file = tmp_path / "report.json"
        conductor("simulate", "--trace", trace, "--backend", "null", "--ttft", ttft, "--json", file)
        found = json.loads(file.read_text())
        assert found["slo"] == {"ttft": ttft, "tbt": 0.2, "deadline": None}
        assert found["summary"]["effective"] == share


def test_speed_and_limit_are_applied_and_named(conductor: Conductor, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    called = conductor("simulate", "--trace", trace, "--backend", "null", "--speed", 2, "--limit", 11, "--json", file)
    found = json.loads(file.read_text())
    assert found["records"]["arrival"] == [i / 2 for i in range(11)]
    assert found["summary"]["offered"] == pytest.approx(2.0)
    assert "2" in called.out.splitlines()[0] and "11" in called.out


MISTAKES = {
    "unknown policy": (
        ["--policy", "kvcache-centrik"],
        "no policy 'kvcache-centrik': .*mean 'kvcache-centric'",
    ),
    "unknown admission": (["--admission", "nine"], "no admission 'nine': .*did you mean 'none'"),
    "unknown backend": (["--backend", "sym"], "no backend 'sym': .*did you mean 'sim'"),
    "unknown cluster": (["--cluster", "papr"], "no cluster 'papr': .*known are paper, small; did you mean 'paper'"),
    "backend's settings": (["--backend", "null:seconds"], "'seconds' is no setting; write name=value"),
    "backend's unknown setting": (["--backend", "live:uri=http://x"], "backend live does not take these"),
    "no url": (["--backend", "live:url=ftp://x"], "no URL of a gateway: write http://HOST:PORT"),
    "nobody there": (["--backend", "live:url=http://127.0.0.1:1"], "no gateway answers at http://127.0.0.1:1"),
    "speed 0": (["--speed", "0"], "--speed must be a number above 0, not 0"),
    "speed NaN": (["--speed", "nan"], "--speed must be a number above 0, not nan"),
    "negative TTFT": (["--ttft", "-1"], "--ttft must be a number above 0, not -1"),
    "infinite TBT": (["--tbt", "inf"], "--tbt must be a number above 0, not inf"),
    "negative seed": (["--seed", "-1"], "--seed must be at least 0, not -1"),
    "limit 0": (["--limit", "0"], "--limit must be at least 1, not 0"),
    "no folder": (["--json", "/nowhere/report.json"], "cannot write /nowhere/report.json: No such file or directory"),
    "a folder": (["--json", "/tmp"], "cannot write /tmp: Is a directory"),
    "picture's kind": (["--plot", "/tmp/report.gif"], "pictures are .png, .svg or .pdf"),
    "plugin that is not made": (["--backend", "broken:where=make"], "broken .* failed to load: ZeroDivisionError"),
    "plugin that does not run": (
        ["--backend", "broken:where=run"],
        "failed to run: ZeroDivisionError: no run",
    ),
    "plugin that answers something else": (
        ["--backend", "broken:where=answer"],
        "failed to run: TypeError: it answered 5 instead of a Report",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_status_2(
    mistake: str, conductor: Conductor, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, complaint = MISTAKES[mistake]
    backend = [] if "--backend" in arguments else ["--backend", "null"]
    called = conductor("simulate", "--trace", trace, *backend, *arguments)
    assert called.status == 2 and called.out == ""
    assert called.err.startswith("conductor simulate: error: ") and called.err.count("\n") == 1
    assert re.search(complaint, called.err), called.err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "directory"),
        ("", "is empty"),
        ("{}", "line 1: .*missing required field"),
        (
            '{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": []}',
            "line 1: input_length must be 1 to",
        ),
        (
            '{"timestamp": 5, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
            '{"timestamp": 4, "input_length": 5, "output_length": 1, "hash_ids": [2]}',
            "line 2: comes 0.001 s before the line above",
        ),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "there are 1 hash_ids"),
    ],
)
def test_a_trace_s_mistake_is_told_with_its_line(
    text: str | None, complaint: str, conductor: Conductor, tmp_path: Path
) -> None:
    path = tmp_path / "odd.jsonl"
    if text is not None:
        path.write_text(text)
    called = conductor("simulate", "--trace", tmp_path if text is None else path, "--backend", "null")
    assert called.status == 2 and called.err.count("\n") == 1
    assert re.search(complaint, called.err), called.err


def test_the_generated_trace_needs_no_file_and_has_seeds(conductor: Conductor, tmp_path: Path) -> None:
    arrivals = []
    for seed in (1, 1, 2):
        file = tmp_path / "report.json"
        called = conductor(
            "simulate", "--trace", "generated", "--backend", "null", "--seed", seed, "--limit", 50, "--json", file
        )
        assert called.status == 0, called.err
        found = json.loads(file.read_text())
        assert f"seed {seed}" in found["provenance"]["trace"]
        arrivals.append(found["records"]["arrival"])
    assert arrivals[0] == arrivals[1] != arrivals[2] and len(arrivals[0]) == 50


def test_halves_are_halves(conductor: Conductor, trace: Path, tmp_path: Path) -> None:
    prompts = []
    for half in ("first", "second"):
        file = tmp_path / "report.json"
        conductor("simulate", "--trace", trace, "--backend", "null", "--half", half, "--json", file)
        prompts += json.loads(file.read_text())["records"]["prompt_tokens"]
    assert prompts == [512 * (i // 3 + 1) + 100 for i in range(30)]


def test_outputs_are_tried_before_the_work(conductor: Conductor, trace: Path, tmp_path: Path) -> None:
    """The plugin would fail to run: that it was not even asked to shows what came first."""
    called = conductor("simulate", "--trace", trace, "--backend", "broken:where=run", "--json", "/nowhere/x.json")
    assert "cannot write" in called.err
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    conductor("simulate", "--trace", trace, "--backend", "broken:where=run", "--json", kept)
    assert kept.read_text() == "before"
    fresh = tmp_path / "fresh.json"
    conductor("simulate", "--trace", trace, "--backend", "broken:where=run", "--json", fresh)
    assert not fresh.exists()


def test_a_picture_without_matplotlib_is_refused_before_the_work(
    conductor: Conductor, trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    called = conductor("simulate", "--trace", trace, "--backend", "null", "--plot", tmp_path / "x.png")
    assert called.status == 2 and "needs matplotlib" in called.err


COMPARE = ("compare", "--cluster", "small", "--backend", "null")
TWO = (*COMPARE, "--policies", "random,least-loaded", "--rates", "1,2")


def test_compare_is_the_same_in_one_process_and_in_two(conductor: Conductor, trace: Path, tmp_path: Path) -> None:
    documents, shown = [], []
    for jobs in (1, 2):
        file = tmp_path / f"{jobs}.json"
        called = conductor(*TWO, "--trace", trace, "--seeds", 6, "--jobs", jobs, "--json", file)
        assert called.status == 0, called.err
        documents.append(json.loads(file.read_text()))
        shown.append(called.out)
    assert documents[0] == documents[1] and shown[0] == shown[1]
    assert len(documents[0]["runs"]) == 2 * 2 * 6
    # The null backend makes no difference between policies, and none is claimed.
    assert [d["real"] for d in documents[0]["differences"]] == [False] * 3
    assert {d["rate"] for d in documents[0]["differences"]} == {"1", "2", "mean"}


def test_compare_draws_curves_and_says_when_seeds_are_too_few(
    conductor: Conductor, trace: Path, tmp_path: Path
) -> None:
    called = conductor(*TWO, "--trace", trace, "--seeds", 2, "--jobs", 1, "--plot", tmp_path / "curves.svg")
    assert called.status == 0 and "it takes 6" in called.out
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_a_real_difference_is_found_and_an_unreal_one_is_not() -> None:
    """Grid of made-up runs: one policy is better by 1 at every seed, the third differs from the first by noise."""
    random = np.random.default_rng(2)
    noise = random.normal(0, 1, 8)
    base = summarize(report(records(10)), Slo())
    goodput = [*(5 + noise), *(6 + noise + random.normal(0, 0.1, 8)), *(5 + noise + random.normal(0, 0.1, 8))]
    runs = [compare_module.Run(msgspec.structs.replace(base, goodput=float(value)), "", {}, ()) for value in goodput]
    grid = compare_module.Grid(["a", "b", "c"], [1.0], 8, runs)
    found = {(one, other): difference for one, other, _, difference in grid.differences()}
    assert found["a", "b"].real and found["b", "c"].real and not found["a", "c"].real
    assert found["a", "b"].mean == pytest.approx(-1, abs=0.2)
    assert "real" in grid.text({}, True)


def test_an_interrupted_comparison_tells_what_is_whole() -> None:
    run = compare_module.Run(summarize(report(records(10)), Slo()), "", {}, ())
    # Two policies, one rate, three seeds; the second policy lacks its last.
    grid = compare_module.Grid(["a", "b"], [1.0], 3, [run, run, run, run, run, None])
    assert grid.whole == [0, 1]
    assert grid.text({}, False).startswith("PARTIAL: stopped early, with 2 of 3 seeds whole")
    assert len(grid.document({}, False)["runs"]) == 5
    nothing = compare_module.Grid(["a", "b"], [1.0], 1, [run, None])
    assert "nothing to compare" in nothing.text({}, False) and nothing.document({}, False)["differences"] == []


def test_a_comma_before_a_setting_does_not_end_a_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyengine.scheduler.commands.contenders.run_spec", lambda *named: named)
    found = contenders("random,mine:ratio=0.5,load=64+none+roles,round-robin", "at-arrival")
    assert [tuple(run) for run in found.values()] == [  # type: ignore[arg-type]
        ("random", "at-arrival", False, 0),
        ("mine:ratio=0.5,load=64", "none", True, 0),
        ("round-robin", "at-arrival", False, 0),
    ]


def test_contenders_have_admission_and_roles() -> None:
    found = contenders("random,least-loaded+at-arrival+roles,round-robin", "none")
    assert [(run.policy, run.admission, run.roles) for run in found.values()] == [
        ("random", "none", False),
        ("least-loaded", "at-arrival", True),
        ("round-robin", "none", False),
    ]
    for wrong in ("random,random", "", "random+none+none", "random+roles+roles"):
        with pytest.raises(InputError):
            contenders(wrong, "none")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rates", "1,x"], "write numbers with commas"),
        (["--rates", "0"], "--rates must be a number above 0"),
        (["--rates", "1,1"], "none twice"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--seeds", "100000"], "are too many"),
        (["--policies", "random,rndom"], "no policy 'rndom'"),
    ],
)
def test_compare_s_mistakes(arguments: list[str], complaint: str, conductor: Conductor, trace: Path) -> None:
    called = conductor(*COMPARE, "--trace", trace, *arguments)
    assert called.status == 2 and complaint in called.err and called.err.count("\n") == 1


def test_plan_finds_the_least_and_says_when_there_is_none(conductor: Conductor, trace: Path, tmp_path: Path) -> None:
    """The null backend takes half a second whatever the cluster: a node of role both does, or none."""
    file = tmp_path / "plan.json"
    well = conductor(
        "plan", "--trace", trace, "--ttft", 1, "--tbt", 1, "--backend", "null", "--json", file, "--plot",
        tmp_path / "plan.png",
    )  # fmt: skip
    assert well.status == 0 and "1B: 1 node serves 100.0%" in well.out
    found = json.loads(file.read_text())
    assert found["best"]["both"] == 1 and [point["prefill"] for point in found["tried"]] == [1, 0]
    ill = conductor("plan", "--trace", trace, "--ttft", 0.1, "--tbt", 1, "--backend", "null", "--nodes-max", 4)
    assert ill.status == 1
    assert "No cluster of up to 4 nodes suffices: the best possible is 0.0%" in ill.out
    assert "1P1D would do with a TTFT of 500 ms, TBT as it is." in ill.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ttft", "0", "--tbt", "1"], "--ttft must be a number above 0"),
        (["--ttft", "1", "--tbt", "nan"], "--tbt must be a number above 0"),
        (["--ttft", "1", "--tbt", "1", "--goodput", "95"], "--goodput is a share"),
        (["--ttft", "1", "--tbt", "1", "--nodes-max", "1"], "--nodes-max must be at least 2"),
        (["--ttft", "1", "--tbt", "1", "--backend", "broken:where=cluster"], "failed to describe its cluster"),
    ],
)
def test_plan_s_mistakes(arguments: list[str], complaint: str, conductor: Conductor, trace: Path) -> None:
    backend = [] if "--backend" in arguments else ["--backend", "null"]
    called = conductor("plan", "--trace", trace, *backend, *arguments)
    assert called.status == 2 and complaint in called.err and called.err.count("\n") == 1


def test_explain_needs_one_of_both_worlds(conductor: Conductor, trace: Path) -> None:
    for arguments in ([], ["--trace", trace, "--conductor", "ipc:///nowhere/x"], ["--trace", trace]):
        called = conductor("explain", "--backend", "null", *arguments)
        assert called.status == 2 and called.err.count("\n") == 1
    called = conductor("explain", "--trace", trace, "--tokens", 5)
    assert called.status == 2 and "ask a live cluster" in called.err
    assert conductor("explain", "--trace", trace, "--request", 3, "--backend", "null").status == 0


def test_replay_needs_a_live_cluster(conductor: Conductor, trace: Path, tmp_path: Path) -> None:
    assert "name the live cluster" in conductor("replay", "--trace", trace).err
    assert "tells nothing of its cluster" in conductor("replay", "--trace", trace, "--backend", "null").err
    wrong = conductor("replay", "--trace", trace, "--backend", "null", "--save-cluster", tmp_path / "x.json")
    assert "ends in .toml" in wrong.err


def test_what_was_measured_is_told_where_it_cannot_be_simulated(
    conductor: Conductor, trace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "replay.json"
    called = conductor(
        "replay", "--trace", trace, "--backend", "null", "--cluster", "small", "--speed", "1e-8", "--json", file
    )  # fmt: skip
    assert called.status == 2 and "a year at most can be simulated" in called.err
    assert "fidelity" in called.out and "none: nothing is computed" in called.out
    found = json.loads(file.read_text())
    assert not found["complete"] and found["live"]["summary"]["done"] == 30 and "simulated" not in found


THIRD_PARTY = """
from tests.backends.null import NullBackend

class Mine(NullBackend):
    name = "mine"
    fidelity = "of a third party"
"""


def test_a_third_party_s_backend_is_one_file_and_one_entry_point(tmp_path: Path, trace: Path) -> None:
    """In a process of its own, which knows nothing of this test but the package on its path."""
    (tmp_path / "somebodys_backend.py").write_text(THIRD_PARTY)
    install(tmp_path, "mine", "somebodys_backend:Mine")
    done = run(tmp_path, "simulate", "--trace", str(trace), "--cluster", "small", "--backend", "mine:seconds=0.5")
    assert done.returncode == 0, done.stderr
    assert "of a third party" in done.stdout


SLOW = '''
import multiprocessing, os, signal, threading
from tests.backends.null import NullBackend

class Slow(NullBackend):
    """Ctrl-C comes in the middle of the run, to whoever has the terminal; a process of his never ends by itself."""
    name = "slow"

    def run(self, task, progress=None):
        def told(done, count, seconds):
            if done == 7:
                child = multiprocessing.parent_process() is not None
                os.kill(os.getppid() if child else os.getpid(), signal.SIGINT)
                if child:
                    threading.Event().wait()
        return super().run(task, told)
'''


def test_ctrl_c_leaves_the_partial_report_and_status_130(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "slow_backend.py").write_text(SLOW)
    install(tmp_path, "slow", "slow_backend:Slow")
    file = tmp_path / "partial.json"
    done = run(tmp_path, "simulate", "--trace", str(trace), "--backend", "slow", "--json", str(file), "--progress")
    assert done.returncode == 130 and done.stdout.startswith("PARTIAL")
    found = json.loads(file.read_text())
    assert not found["complete"] and 7 <= found["summary"]["requests"] < 30
    for command, *flags in (
        ("compare", "--seeds", "2", "--jobs", "1"),
        ("compare", "--seeds", "2", "--jobs", "2"),
        ("plan", "--ttft", "1", "--tbt", "1"),
    ):
        done = run(tmp_path, command, "--trace", str(trace), "--backend", "slow", *flags)
        assert done.returncode == 130 and done.stdout.startswith("PARTIAL"), (command, done.stdout, done.stderr)
        assert done.stderr == ""


def run(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`conductor` as a process."""
    environment = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{Path(__file__).parents[2]}"}
    command = [sys.executable, "-m", "pyengine.scheduler.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
