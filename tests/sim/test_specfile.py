"""Goal: a cluster file says what is simulated, or what is wrong with it. Method: round trips; every kind of mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.scheduler.sim.baselines import DISCIPLINES
from pyengine.scheduler.sim.spec import MAX_WORKERS, ClusterSpec, NodeSpec, WorkerSpec
from pyengine.scheduler.sim.specfile import SpecError, check_cluster, load_cluster, names, parse_cluster, to_toml
from pyengine.scheduler.types import Role, Slo

PAIR = '[[workers]]\nrole = "prefill"\ncount = 1\n[[workers]]\nrole = "decode"\ncount = 1\n'

positive = st.floats(1e-6, 1e15)
workers = st.builds(
    WorkerSpec, role=st.sampled_from(list(Role)), count=st.integers(0, 9), pages=st.integers(1, 99),
    stages=st.integers(1, 4), discipline=st.sampled_from(sorted(DISCIPLINES)),
)  # fmt: skip
specs = st.builds(
    ClusterSpec,
    workers=st.lists(workers, max_size=3).map(lambda some: (*some, WorkerSpec(role=Role.BOTH, count=1))),
    node=st.builds(NodeSpec, link_rate=positive, link_delay=st.floats(0, 10), ssd_tokens=st.integers(0, 99)),
    fabric_rate=st.one_of(st.none(), positive),
    slo=st.builds(Slo, ttft=st.one_of(st.none(), positive), tbt=positive, deadline=st.none()),
)


@given(specs)
def test_a_written_cluster_is_read_as_the_same(spec: ClusterSpec) -> None:
    assert parse_cluster(to_toml(spec), Path()) == spec


def test_a_name_of_any_characters_is_written_as_it_is() -> None:
    odd = '"\x7f\\\n\u00e4'
    spec = ClusterSpec(workers=(WorkerSpec(role=Role.BOTH, count=1, model=odd),))
    assert tomllib.loads(to_toml(spec))["workers"][0]["model"] == odd


def test_the_clusters_that_come_along_are_sound() -> None:
    assert {"paper", "small"} <= set(names())
    for name in names():
        check_cluster(load_cluster(name))
    paper = load_cluster("paper")
    assert [(worker.role, worker.count) for worker in paper.workers] == [(Role.PREFILL, 8), (Role.DECODE, 8)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (PAIR.replace('"decode"', '"prefill"'), "0 decode workers"),
        (PAIR.replace("count = 1\n[[", "count = 0\n[["), "0 prefill workers"),
        ("", "workers"),
        ("workers = []", "0 prefill workers"),
        (PAIR + "\n[node]\nlink_rte = 1.0", "no node.link_rte: .*did you mean 'link_rate'"),
        (PAIR + "\n[slo]\nttfd = 1.0", "no slo.ttfd: .*did you mean 'ttft'"),
        (PAIR + "pages_ = 3", "no workers\\[1\\].pages_: .*did you mean 'pages'"),
        ("blok_tokens = 4\n" + PAIR, "no blok_tokens: .*did you mean 'block_tokens'"),
        (PAIR + "\n[node]\nlink_rate = 0.0", "node.link_rate must be above 0, not 0"),
        (PAIR + "\n[node]\nssd_rate = nan", "node.ssd_rate must be above 0, not nan"),
        (PAIR + "\n[node]\ndevice_rate = inf", "node.device_rate must be above 0, not inf"),
        (PAIR + "\n[node]\nlink_delay = -1e-3", "node.link_delay must be 0 or more, not -0.001"),
        (PAIR + "\n[slo]\ntbt = -0.1", "slo.tbt must be a number of seconds above 0"),
        (PAIR + "\n[slo]\ntbt = nan", "slo.tbt must be a number of seconds above 0"),
        ("fabric_rate = 0.0\n" + PAIR, "fabric_rate must be above 0"),
        (PAIR + "pages = 0", "workers\\[1\\].pages must be above 0"),
        (PAIR + "count = 2", "not TOML"),
        (
            PAIR.replace('"decode"', '"decoding"'),
            "workers\\[1\\].role: there is no 'decoding': .*did you mean 'decode'",
        ),
        (PAIR.replace("count = 1\n[[", f"count = {MAX_WORKERS}\n[["), "more than can be simulated"),
        (PAIR + 'discipline = "vlm"', "discipline: there is no 'vlm': .*did you mean 'vllm'"),
        (PAIR + '[node]\nevict = "lruu"', "node.evict: there is no 'lruu': .*did you mean 'lru'"),
        (PAIR + 'model = "llama3-70b-a8000"', "model: .*did you mean 'llama3-70b-a800'"),
        (PAIR + "[node]\ndram_tokens = 1023", "node.dram_tokens must be 1,024 at least, two blocks of it, not 1,023"),
        (PAIR + "[node]\ndram_tokens = 1_000_000_000_000", "blocks, more than can be simulated"),
        (PAIR + "[node]\nssd_tokens = 1_000_000_000_000", "blocks, more than can be simulated"),
        (PAIR + "[node]\ndram_tokens = 9_000_000_000_000_000_000", "node.dram_tokens must be at most"),
        (PAIR + "pages = 900_000_000", "pages, more than can be simulated"),
        (f"kv_bytes = {10**9}\n" + PAIR, "kv_bytes 1,000,000,000: a block of 512 tokens has"),
        ("kv_bytes = 3\n" + PAIR, "kv_bytes must be 4 at least"),
        (f"kv_bytes = {10**23}\n" + PAIR, "kv_bytes"),
        (PAIR + "block_tokens = 1.5", "block_tokens"),
        ("workers = 3", "workers"),
        ("node = 3\n" + PAIR, "node"),
        ("[[[", "not TOML"),
    ],
)
def test_a_mistake_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=complaint) as caught:
        load_cluster(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "huge.toml").write_bytes(b"# a comment\n" * 200_000)
    for name, complaint in (
        (str(tmp_path / "none.toml"), "No such file"),
        (str(tmp_path) + "/", "Is a directory"),
        (str(tmp_path / "binary.toml"), "is not text"),
        (str(tmp_path / "huge.toml"), "is larger than"),
        ("papr", "known are paper, small; did you mean 'paper'"),
    ):
        with pytest.raises(SpecError, match=complaint):
            load_cluster(name)


def test_a_path_of_a_cost_model_is_seen_from_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    model = 'about = "a"\nsource = "b"\n[seconds]\ntoken = 1e-4\npair = 0\ndecode = 1e-3\nsequence = 0\ncontext = 0\n'
    (folder / "mine.toml").write_text(model)
    (folder / "cluster.toml").write_text(PAIR + 'model = "mine.toml"')
    assert load_cluster(str(folder / "cluster.toml")).workers[1].model == str(folder / "mine.toml")
