"""Goal: workers tell where the time to a first and a second token went, each part once, and no more than there was.

Method: real daemons and worker loops; a fake model whose steps take a known time at least, so that parts have a lower
bound, and the time of the whole is their upper bound.
"""

from __future__ import annotations

import time

from pyengine.backends.fake import FakeBackend, fake_tokens
from pyengine.scheduler.messages import Handoff, Message, PrefillReport, Tokens
from pyengine.scheduler.types import SamplingParams
from pyengine.worker.service import sample_names
from tests.worker.harness import Cluster
from tests.worker.test_worker import prompt

STEP = 0.03
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Heard(Cluster):
    """Keeps what is told of times."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[PrefillReport] = []
        self.handoffs: list[tuple[int, Handoff]] = []

    def __enter__(self) -> Heard:
        return self

    def _take(self, message: Message) -> None:
        super()._take(message)
        if isinstance(message, PrefillReport):
            self.reports.append(message)
        if isinstance(message, Tokens) and message.handoff is not None:
            self.handoffs.append((message.first, message.handoff))


def apart(nodes: str) -> Heard:
    made = Heard()
    for node in sorted(set(nodes)):
        made.add_node(node, 64, FakeBackend())
    made.add_worker("prefill", nodes[0], FakeBackend(seconds_per_step=STEP))
    made.add_worker("decode", nodes[1], FakeBackend(seconds_per_step=STEP))
    return made


def test_a_hand_off_is_told_once_with_the_first_token_of_the_decode_worker() -> None:
    for nodes in ("ab", "aa"):  # over a wire, and within one arena
        with apart(nodes) as cluster:
            ids = prompt(100, 3)
            began = time.monotonic()
            request = cluster.submit(ids, "prefill", "decode", sampling=GREEDY)
            cluster.run(request)
            took = time.monotonic() - began
            assert request.ids == fake_tokens(ids, 4)
            ((first, handoff),) = cluster.handoffs
            (report,) = cluster.reports
            assert first == 1
            parts = (handoff.waited, handoff.arriving, handoff.loading, handoff.computing)
            assert min(parts) >= 0.0 and sum(parts) <= took
            assert handoff.computing >= STEP  # one step of its own
            assert report.computing >= 2 * STEP  # 100 tokens, 64 a step
            assert handoff.waited + handoff.arriving >= 2 * STEP  # what it waited for
            assert report.queued + report.loading + report.computing <= took


def test_who_does_both_parts_hands_nothing_off() -> None:
    with Heard() as cluster:
        cluster.add_node("a", 64, FakeBackend())
        worker = cluster.add_worker("both", "a", FakeBackend())
        for _ in range(2):  # the second finds 96 of its 100 tokens in the worker's pages
            cluster.run(cluster.submit(prompt(100, 4), "both", "both", sampling=GREEDY))
        assert cluster.handoffs == [] and len(cluster.reports) == 2
        counted = sample_names("both", worker)

        def value(name: str) -> float:
            return counted[f'vllm:{name}{{model_name="fake",worker="both"}}']

        assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (200, 96)
        assert value("external_prefix_cache_queries_total") == 200 - 96
        assert value("external_prefix_cache_hits_total") == value("kv_cache_usage_perc") == 0
