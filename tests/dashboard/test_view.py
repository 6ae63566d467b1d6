"""Goal: what the dashboard shows is what the counters and the latest requests say, and nothing foreign becomes markup.
Method: counters and records made by hand, read back from the plain view and from the HTML by a parser.
"""

from __future__ import annotations

import math
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.dashboard import drawing, figures, story
from pyengine.dashboard.view import HISTORY, TIERS, WINDOW, Counters, Facts, Meter, Observer, View
from pyengine.gateway.metrics import escape as escape_label
from pyengine.gateway.recent import Choice, Record
from pyengine.scheduler.explanation import Candidate, Explanation
from pyengine.scheduler.messages import HotPrefix
from pyengine.scheduler.types import Node, Role, WorkerInfo
from tests.gateway.cluster import NAMESPACE

NASTY = "<script>alert(1)</script>\"'&"
PARTS = {"tokenize": 0.01, "schedule": 0.02, "queue": 0.03, "load": 0.04, "prefill": 0.1, "return": 0.0, "ttft": 0.2}


class Page(HTMLParser):
    """What is in a piece of HTML: the tags that are open, tables by rows of cells, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in ("rect", "line", "polyline"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def facts(**more: Any) -> Facts:
    known: dict[str, Any] = {
        "at": 10.0,
        "conductor_up": True,
        "servable": {"m": True},
        "under_way": 1,
        "prompt_tokens": 100,
        "generated_tokens": 50,
        "finished": {"stop": 3, "busy": 2},
        "promised": 4,
        "kept": 3,
    }
    return Facts(**{**known, **more})


def choice(**more: Any) -> Choice:
    known: dict[str, Any] = {
        "id": 7,
        "end": "stop",
        "tokens": 5,
        "prefill": "p",
        "decode": "d",
        "parts": {**PARTS, "handoff": 0.05},
        "handoff": {"waited": 0.01},
        "total": 0.5,
        "tbt": 0.04,
        "ttft_kept": True,
        "tbt_kept": False,
    }
    return Choice(**{**known, **more})


def record(*choices: Choice, **more: Any) -> Record:
    known: dict[str, Any] = {
        "number": "abc",
        "when": 990.0,
        "model": "m",
        "tenant": "",
        "end": "stop",
        "prompt": 100,
        "cached": 32,
        "completion": 5,
        "tiers": {"dram": 32},
        "choices": choices or (choice(),),
    }
    return Record(**{**known, **more})


def view(samples: dict[str, float], *records: Record, hot: tuple[HotPrefix, ...] = (), **more: Any) -> View:
    return Observer().view((), samples, 10.0, facts(**more), hot, records, 1000.0)


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3), st.floats(0, 1e9))
def test_labels_are_read_as_they_were_written(labels: dict[str, str], value: float) -> None:
    named = {f"l{at}": text for at, text in enumerate(labels.values())}
    inside = ",".join(f'{name}="{escape_label(text)}"' for name, text in named.items())
    (sample,) = Counters({f"family{{{inside}}}" if inside else "family": value}).of("family")
    assert (sample.labels, sample.value) == (named, value)


def test_a_rate_is_of_the_last_seconds_and_begins_anew() -> None:
    meter = Meter()
    assert meter.rate("x", 100.0, 0.0) == 0.0
    assert [meter.rate("x", 100.0 + 5.0 * at, at) for at in (1.0, 2.0, 2.0)] == [5.0, 5.0, 5.0]
    for at in range(3, 40):
        meter.rate("x", 110.0, float(at))
    assert meter.rate("x", 110.0, 40.0) == 0.0, "nothing came in the window"
    assert meter.rate("x", 110.0 + WINDOW, 41.0) > 0.0
    assert meter.rate("x", 3.0, 42.0) == 0.0, "whoever counts was started again"


def test_nodes_and_workers_are_what_the_counters_say() -> None:
    shown = view(
        {
            'pyengine_node_up{node="n0"}': 1,
            'pyengine_node_up{node="n1"}': 0,
            'pyengine_pool_blocks{node="n0",tier="dram",state="free"}': 75,
            'pyengine_pool_blocks{node="n0",tier="dram",state="cached"}': 25,
            'pyengine_pool_blocks{node="n0",tier="ssd",state="stored"}': 99,
            'pyengine_tier_used_bytes{node="n0",tier="ssd"}': 1 << 20,
            'pyengine_tier_limit_bytes{node="n0",tier="ssd"}': 4 << 20,
            'pyengine_worker_up{worker="w"}': 0,
            'vllm:kv_cache_usage_perc{model_name="m",worker="w"}': 0.5,
            'vllm:num_requests_running{model_name="m",worker="w"}': 3,
            'pyengine_transfer_blocks_total{transport="tcp",direction="in",node="n0"}': 7,
            'pyengine_transfer_bytes_total{transport="tcp",direction="in",node="n0"}': 7168,
            'pyengine_transfer_blocks_total{transport="shm",direction="in",node="n0"}': 0,
            'pyengine_cached_tokens_total{worker="w",tier="dram"}': 30,
            'pyengine_worker_tokens_total{worker="w",phase="prefill"}': 70,
        }
    )
    first, second = shown.nodes
    assert (first.name, first.up, first.dram) == ("n0", True, {"free": 75, "cached": 25})
    assert (first.ssd_used, first.ssd_limit, second.up) == (1 << 20, 4 << 20, False)
    (worker,) = shown.workers
    assert (worker.up, worker.pages, worker.running) == (False, 0.5, 3) and "w: away" in shown.trouble
    (transfer,) = shown.transfers
    assert (transfer.transport, transfer.blocks, transfer.bytes) == ("tcp", 7, 7168)
    assert shown.tiers == {**dict.fromkeys(TIERS, 0), "dram": 30, "computed": 70}
    page = Page(drawing.nodes(shown))
    assert page.rows[1][:2] == ["n0", "up"] and "25 of 100 blocks" in page.rows[1][2]
    assert page.rows[2][:2] == ["n1", "away"]
    assert Page(drawing.tiers(shown)).text.count("30 %") == 1


def test_what_is_wrong_is_said() -> None:
    assert view({}).trouble == ""
    assert "conductor is away" in view({}, conductor_up=False).trouble
    assert "no worker" in view({}, servable={}).trouble
    assert "m: no worker" in view({}, servable={"m": False}).trouble
    assert 'class="chip bad"' in drawing.state(view({}, servable={}))


def test_requests_of_late_make_the_figures() -> None:
    old = record(choice(parts={**PARTS, "ttft": 9.0}), when=100.0)
    shown = view({}, record(), record(choice(parts={**PARTS, "ttft": 0.4})), old)
    named = {curve.name: curve for curve in shown.curves}
    assert named["Time to first token"].value == 0.4 and "400 ms" in named["Time to first token"].hint
    assert named["Prompt tokens reused"].value == 32.0
    (refused,) = [each for each in shown.refusals if each.count]
    assert (refused.who, refused.reason, refused.count) == ("gateway", "busy", 2)
    assert "3 of 4 answers" in Page(drawing.promises(shown)).text and "75.0 %" in drawing.promises(shown)


def test_a_curve_keeps_two_minutes() -> None:
    observer = Observer()
    for at in range(HISTORY + 30):
        shown = observer.view((), {}, float(at), facts(at=float(at), under_way=at), (), (), 0.0)
    points = shown.curves[0].points
    assert len(points) == HISTORY and points[-1] == HISTORY + 29
    assert Page(drawing.head(shown)).tags.count("polyline") == len(shown.curves)


def test_nothing_to_show_is_said_in_words() -> None:
    shown = view({}, promised=0, kept=0, finished={})
    for name, html in drawing.sections(shown, 0.0).items():
        page = Page(html)
        assert "table" not in page.tags and page.text.strip(), name


def test_foreign_text_is_no_markup() -> None:
    lost = ((0.1, NASTY),)
    nasty = record(choice(prefill=NASTY, decode=NASTY, end=NASTY, lost=lost), number=NASTY, model=NASTY, tenant=NASTY)
    nasty = msgspec.structs.replace(nasty, end=NASTY, tiers={NASTY: 3})
    label = escape_label(NASTY)
    shown = view(
        {
            f'pyengine_node_up{{node="{label}"}}': 1,
            f'pyengine_pool_blocks{{node="{label}",tier="dram",state="{label}"}}': 5,
            f'pyengine_worker_up{{worker="{label}"}}': 0,
            f'pyengine_worker_info{{worker="{label}",backend="{label}",dtype="{label}"}}': 1,
            f'pyengine_transfer_blocks_total{{transport="{label}",direction="{label}",node="{label}"}}': 1,
            f'pyengine_conductor_rejections_total{{reason="{label}"}}': 1,
        },
        nasty,
        hot=(HotPrefix(bytes(16), 3, 1.0, 2.0, (NASTY,)),),
        servable={NASTY: False},
    )
    for html in drawing.sections(shown, 1000.0).values():
        assert "script" not in Page(html).tags
    assert NASTY in Page(drawing.requests(shown, 1000.0)).text
    explained = explanation(NASTY)
    for html in (story.facts(nasty), story.timeline(nasty.choices[0]), story.why(explained)):
        page = Page(html)
        assert "script" not in page.tags and NASTY in page.text


def explanation(name: str = "w") -> Explanation:
    candidate = Candidate(
        worker=name,
        node=name,
        role=name,
        prefills=True,
        decodes=True,
        inlines=True,
        masked=name,
        device=1,
        dram=2,
        ssd=3,
        coming=4,
        coming_seconds=0.0,
        load=0.01,
        transfer=0.02,
        queue=0.03,
        compute=0.04,
        ttft=0.1,
        tbt=0.005,
        handoff=0.006,
        running=7,
        free_pages=8,
        measured=False,
        correction=1.0,
        terms={name: 0.5},
    )
    other = msgspec.structs.replace(candidate, worker="other", terms={})
    return Explanation(
        gateway=name,
        request=7,
        attempt=0,
        at=0.0,
        policy=name,
        prompt_tokens=100,
        blocks=6,
        best=3,
        prefill=name,
        decode="other",
        fetch=True,
        predicted_ttft=0.1,
        why=name,
        candidates=(candidate, other),
    )


def test_a_timeline_adds_up_and_every_term_of_a_decision_is_there() -> None:
    one = choice()
    spans = list(story.spans(one))
    assert [span.name for span in spans][-2:] == ["handoff", "decode"]
    assert all(before.end == pytest.approx(after.begin) for before, after in pairwise(spans))
    assert spans[0].begin == 0.0 and spans[-1].end == one.total
    page = Page(story.timeline(one))
    assert [row[0] for row in page.rows[1:]] == [span.name for span in spans]
    assert "kept" in page.text and "missed" in page.text
    held = choice(parts={**one.parts, "held": 0.03})
    assert "held for 30 ms" in Page(story.timeline(held)).text and "held" not in page.text
    alone = choice(decode="p")
    assert "handoff" not in [span.name for span in story.spans(alone)], "who does both hands nothing over"
    assert "no first token yet" in story.timeline(choice(parts={}, lost=((0.5, "it died"),)))

    rows = Page(story.why(explanation())).rows
    named = dict(zip(rows[0], rows[1], strict=True))
    assert named["worker"].startswith("w prefill") and rows[2][0].startswith("other decode")
    expected = {"queue": "30 ms", "load": "10 ms", "transfer": "20 ms", "compute": "40 ms", "TTFT": "100 ms"}
    assert expected.items() <= named.items()
    assert (named["in pages"], named["in DRAM"], named["on SSD"], named["w"]) == ("1", "2", "3", "0.5")
    assert rows[2][rows[0].index("w")] == figures.UNKNOWN
    refused = msgspec.structs.replace(explanation(), refused="too much", prefill="", decode="", candidates=())
    assert "Refused: too much" in Page(story.why(refused)).text
    assert "latest 64" in story.why(None)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 µs"), (2.5e-5, "25 µs"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (2.0, "2.00 s"), (1234.0, "1,234 s")],
)
def test_seconds_are_told_in_the_unit_that_fits(value: float, text: str) -> None:
    assert figures.seconds(value) == text


def test_other_figures() -> None:
    assert figures.seconds(math.nan) == figures.UNKNOWN == figures.percent(1, 0)
    assert [figures.size(value) for value in (0, 1023, 1024, 150 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "150 MiB",
        "3.0 TiB",
    ]
    assert [figures.ago(value) for value in (-1.0, 5.0, 600.0, 7200.0)] == [
        "0 s ago",
        "5 s ago",
        "10 min ago",
        "2 h ago",
    ]


def test_workers_that_are_there_have_their_place() -> None:
    """From what they said of themselves, also before any counter has come."""
    info = WorkerInfo(
        worker="w",
        incarnation=1,
        role=Role.PREFILL,
        node=Node("node-0", "127.0.0.1:1", 1),
        work="ipc://x",
        model="m",
        tokenizer="bytes",
        namespace=NAMESPACE,
        vocab_size=258,
        max_positions=1024,
        pages=64,
        pool_slots=64,
        max_tokens_per_step=512,
        max_sequences=32,
    )
    shown = Observer().view((info,), {}, 0.0, facts(), (), (), 0.0)
    (worker,) = shown.workers
    assert (worker.name, worker.role, worker.node, worker.up) == ("w", "prefill", "node-0", True)
    assert shown.block_tokens == NAMESPACE.kv.block_tokens
