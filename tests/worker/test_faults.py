"""Goal: whatever goes wrong in a gateway, a model, a peer or a daemon, a worker answers with a typed failure, lets go
of everything, and serves the next request.

Method: the clusters of harness.py with one part replaced by a misbehaving twin: a model that raises, a pool that is
behind, a push with a wrong note, a gateway that sends nonsense; and daemons killed while blocks cross between nodes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest

from pyengine import _native, kv_mover
from pyengine._native import Tag
from pyengine.backend import U8, Slice, WorkerBroken
from pyengine.backends.fake import EOS, FakeBackend, fake_tokens
from pyengine.scheduler.messages import Note
from pyengine.scheduler.types import Node, Role, SamplingParams, Slo, Source
from pyengine.worker.core import HOPELESS_STEPS
from tests.worker.harness import Cluster, Request
from tests.worker.test_worker import backend, one_node, prompt, two_nodes

POISON = 255


class Twin:
    """A pool that does as the real one does, but for what a subclass changes."""

    def __init__(self, pool: _native.PoolClient) -> None:
        self.real = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def works(cluster: Cluster, prefill: str = "prefill", decode: str = "decode") -> None:
    """A fresh request is answered rightly, and after it nothing is held."""
    request = cluster.submit(prompt(70, 99), prefill, decode)
    cluster.run(request)
    assert request.failed is None
    assert request.ids == fake_tokens(prompt(70, 99), 8)
    cluster.settle()


def kind_of(request: Request) -> str | None:
    return request.failed.kind if request.failed is not None else None


# -- a gateway that sends nonsense ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"part": "both of them"},
        {"token_ids": b""},
        {"token_ids": b"\0\0\0"},
        {"token_ids": (258).to_bytes(4, "little") * 20},
        {"keys": b"short"},
        {"keys": b""},
        {"keys": bytes(16) * 2},
        {"keys": bytes(16) * 3},
        {"root": b"short"},
        {"root": bytes(16)},
        {"generated": -1},
        {"generated": 40},
        {"generated": 8},
        {"request": 2**63},
        {"attempt": -1},
        {"attempt": 2**32},
        {"decode_incarnation": 2**64},
        {"decode_node": Node("a", "127.0.0.1:1", -1)},
        {"sources": (Source(Node("b", "127.0.0.1:1", -1), 0, 2),)},
        {"sources": (Source(Node("b", "127.0.0.1:1", 1), -2, 2),)},
        {"cached_blocks": -1},
        {"tenant": 2**64},
        {"deadline": float("nan")},
        {"deadline": -1.0},
        {"waited": -1.0},
        {"slo": Slo(tbt=float("nan"))},
        {"slo": Slo(deadline=-0.5)},
        {"priority": 2**31},
    ],
    ids=lambda changes: ",".join(changes),
)
@pytest.mark.parametrize("part", ["prefill", "decode", "both"])
def test_malformed_work_is_answered(part: str, changes: dict[str, Any]) -> None:
    with one_node() as cluster:
        worker = "decode" if part == "decode" else "prefill"
        name = {"prefill": ("prefill", "decode"), "decode": ("prefill", "decode"), "both": ("prefill", "prefill")}[part]
        request = cluster.submit(prompt(40), *name, parts=(part,), changes=changes)
        # The answer names the request as the nonsense did.
        number, attempt = changes.get("request", request.number), changes.get("attempt", request.attempt)
        cluster.requests[number, attempt] = request
        cluster.run(request)
        assert kind_of(request) == "bug"
        assert cluster.workers[worker].idle
        cluster.settle()
        works(cluster)


def test_role_and_incarnation_of_work_must_fit() -> None:
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        cluster.add_worker("prefill", "a", backend(), role=Role.PREFILL)
        cluster.add_worker("decode", "a", backend(), role=Role.DECODE)
        for request in (
            cluster.submit(prompt(40), "prefill", "prefill"),
            cluster.submit(prompt(40), "decode", "prefill", parts=("prefill",)),
            cluster.submit(prompt(40), "decode", "prefill", parts=("decode",)),
        ):
            cluster.run(request)
            assert kind_of(request) == "wrong_role"
        changes = {"decode_incarnation": cluster.workers["decode"].mover.incarnation ^ 1}
        late = cluster.submit(prompt(40), "prefill", "decode", parts=("decode",), changes=changes)
        cluster.run(late)
        assert kind_of(late) == "retry"
        whole = cluster.submit(prompt(40), "decode", "decode")
        cluster.run(whole)
        assert whole.ids == fake_tokens(prompt(40), 8), "a decode worker takes a whole request, if it is sent one"
        works(cluster)


@pytest.mark.parametrize("part", ["prefill", "decode", "both"])
@pytest.mark.parametrize("waited", [0.0, 60.0])
def test_what_cannot_be_in_time_for_its_client_is_dropped_and_called_late(part: str, waited: float) -> None:
    """waited: it is hopeless on arrival. Else the other part never comes, or nobody is admitted meanwhile."""
    with two_nodes() as cluster:
        batcher = cluster.workers["prefill"].batcher
        batcher.max_sequences = 0
        changes = {"slo": Slo(deadline=60.0 if waited else 0.1), "waited": waited}
        names = ("prefill", "prefill") if part == "both" else ("prefill", "decode")
        request = cluster.submit(prompt(40), *names, parts=(part,), changes=changes)
        cluster.run(request)
        assert kind_of(request) == "late"
        cluster.settle()
        batcher.max_sequences = 32
        works(cluster)


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_an_attempt_past_its_deadline_is_ended_though_no_gateway_says_so(part: str) -> None:
    """The other part never comes; decode's grant would wait for it for ever."""
    with two_nodes() as cluster:
        request = cluster.submit(prompt(40), "prefill", "decode", parts=(part,), deadline=0.1)
        cluster.run(request)
        assert kind_of(request) == "retry"
        works(cluster)


def test_more_ends_between_two_steps_than_are_remembered_are_all_told() -> None:
    """The links keep an owner per attempt until they are told of its end."""
    with one_node() as cluster:
        worker = cluster.workers["decode"]
        requests = [cluster.submit(prompt(3), "decode", "decode", number=n, deadline=-1.0) for n in range(1, 5001)]
        cluster.step("decode")
        assert set(worker.take_ended()) == {(request.number, 1) for request in requests}


# -- a model that fails --------------------------------------------------------------------------------------------


class Failing(FakeBackend):
    """Fails on every step that holds the poison token (or on all), as told: by an error or by an impossible token."""

    def __init__(self, how: str = "raises", always: bool = False) -> None:
        super().__init__()
        self.how = how
        self.always = always

    def execute(self, slices: list[Slice]) -> list[int]:
        tokens = super().execute(slices)
        if self.always or any(POISON in slice_.tokens for slice_ in slices):
            if self.how == "raises":
                raise ArithmeticError("poison")
            if self.how == "too few":
                return tokens[1:]
            return [{"none": -1, "too large": 10**6}[self.how] if token >= 0 else token for token in tokens]
        return tokens


def clean(length: int, seed: int) -> list[int]:
    return [token % POISON for token in prompt(length, seed)]


@pytest.mark.parametrize("how", ["raises", "too few", "none", "too large"])
def test_a_request_that_the_model_fails_on_falls_alone(how: str) -> None:
    with Cluster() as cluster:
        cluster.add_node("a", 128, backend())
        worker = cluster.add_worker("both", "a", Failing(how), max_tokens=512)
        sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        early = cluster.submit(clean(50, 0), "both", "both", sampling=sampling)
        cluster.until(lambda: len(early.tokens) > 3)
        poisoned = cluster.submit([*clean(40, 1), POISON], "both", "both")
        beside = cluster.submit(clean(45, 2), "both", "both")
        cluster.run(early, poisoned, beside)
        assert kind_of(poisoned) == "bug"
        assert early.ids == fake_tokens(clean(50, 0), 30)
        assert beside.ids == fake_tokens(clean(45, 2), 8)
        assert worker.counters["prefill"] == 50 + 45, "what was not computed is not counted"
        assert worker.counters["recomputed"] == 0
        cluster.settle()


def test_a_model_that_always_fails_ends_the_worker() -> None:
    """Its requests get no answer from it: their gateway sees it go, and retries them elsewhere."""
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        cluster.add_worker("both", "a", Failing(always=True))
        for _ in range(HOPELESS_STEPS - 1):
            request = cluster.submit(prompt(20), "both", "both")
            cluster.run(request)
            assert kind_of(request) == "bug"
        last = cluster.submit(prompt(20), "both", "both")
        with pytest.raises(WorkerBroken):
            cluster.run(last)
        assert not last.over


# -- a pool that is behind, empty, or lies -------------------------------------------------------------------------


def behind(method: str, calls: int) -> type[Twin]:
    """A pool whose daemon does not keep up: from the given call of one method on, that method is refused."""

    class Behind(Twin):
        def __getattr__(self, name: str) -> Any:
            if name == method:
                return self.refuse
            return super().__getattr__(name)

        def refuse(self, *arguments: Any, **named: Any) -> None:
            nonlocal calls
            calls -= 1
            if calls < 0:
                raise _native.RetryError("the daemon does not keep up")
            getattr(self.real, method)(*arguments, **named)

    return Behind


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize(
    ("worker", "method"),
    [("prefill", name) for name in ("open", "lookup", "grant", "store", "commit", "push", "end")]
    + [("decode", name) for name in ("grant", "lookup", "store", "commit", "end")],
)
def test_a_daemon_that_does_not_keep_up_is_let_go(worker: str, method: str, calls: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with two_nodes(**{worker: behind(method, calls)}) as cluster:  # type: ignore[arg-type]
        requests = [cluster.submit(prompt(90, seed), "prefill", "decode", sampling=sampling) for seed in range(4)]
        cluster.run(*requests)
        for seed, request in enumerate(requests):
            if request.failed is None:
                assert request.ids == fake_tokens(prompt(90, seed), 40)
            else:
                assert kind_of(request) == "retry"
        if method == "lookup" and worker == "decode":
            return  # decode looks nothing up unless it is preempted
        cluster.until(lambda: cluster.workers[worker].mover.pool is None)
        cluster.attach(worker)
        works(cluster)


class RefusesLookups(Twin):
    """Answers a lookup by Refused (as an engine at its limit of tags does)."""

    def lookup(self, tag: Tag, keys: bytes) -> None:
        self.real.commit(tag, [7])


@pytest.mark.parametrize("fetch", [False, True])
def test_a_refused_lookup_costs_a_recompute(fetch: bool) -> None:
    with two_nodes(prefill=RefusesLookups) as cluster:
        request = cluster.submit(prompt(100), "prefill", "decode", sources=cluster.source("b", 6) if fetch else ())
        cluster.run(request)
        assert request.ids == fake_tokens(prompt(100), 8)
        cluster.settle()


class Unreadable(Twin):
    """Every copy out of the pool turns out not to be intact."""

    def load(self, slot: int, generation: int, into: U8, first_strip: int = 0, run: int = 1, stride: int = 1) -> bool:
        return False


@pytest.mark.parametrize(("length", "kind"), [(300, "need_prefill"), (64, None)])
def test_much_lost_kv_goes_back_for_a_new_plan(length: int, kind: str | None) -> None:
    """Decode mends up to four steps' worth of lost KV itself (4 x 16 tokens here)."""
    with Cluster() as cluster:
        for node, name in (("a", "prefill"), ("b", "decode")):
            cluster.add_node(node, 64, backend())
            wrap = Unreadable if name == "decode" else None
            cluster.add_worker(name, node, backend(), max_tokens=16, wrap=wrap)
        request = cluster.submit(prompt(length), "prefill", "decode")
        cluster.run(request)
        assert kind_of(request) == kind
        decode = cluster.workers["decode"]
        if kind is None:
            assert request.ids == fake_tokens(prompt(length), 8)
            assert decode.counters["recomputed"] == length
        else:
            assert decode.counters["recomputed"] == 0
        assert decode.mover.counters["checksum_failures"] == 1
        cluster.settle()


class Forgetful(Twin):
    """Finds nothing it was ever given."""

    def lookup(self, tag: Tag, keys: bytes) -> None:
        self.real.lookup(tag, bytes(16))


def test_a_preempted_sequence_whose_kv_is_all_gone_goes_back_too() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        cluster.add_node("b", 64, backend())
        cluster.add_worker("prefill", "a", backend())
        decode = cluster.add_worker(
            "decode",
            "b",
            backend(),
            pages=14,
            wrap=Forgetful,
        )
        decode.recompute_limit = 8
        requests = cluster.together(
            "decode",
            lambda: [cluster.submit(prompt(80, seed), "prefill", "decode", sampling=sampling) for seed in range(2)],
        )
        cluster.run(*requests)
        assert decode.counters["preempted"] > 0
        assert sorted(map(str, map(kind_of, requests))) == ["None", "need_prefill"]
        cluster.settle()


def note(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(Note(first_token=65, cached=0, computed=1), **changes))


@pytest.mark.parametrize("wrong", [b"\xff", b"", note(first_token=-1), note(first_token=10**6), note(first_token=EOS)])
def test_a_wrong_note_fails_its_request_alone(wrong: bytes) -> None:
    class Misnoting(Twin):
        done = False

        def push(self, local: Tag, tag: Tag, indices: list[int], first: int = 0, note: bytes | None = None) -> None:
            if note is not None and not Misnoting.done:
                Misnoting.done, note = True, wrong
            self.real.push(local, tag, indices, first, note)

    with two_nodes(prefill=Misnoting) as cluster:  # type: ignore[arg-type]
        request = cluster.submit(prompt(40), "prefill", "decode", sampling=SamplingParams(temperature=0.0))
        cluster.run(request)
        assert kind_of(request) == "bug"
        works(cluster)


# -- limits --------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_staged_a_bounded_number_of_blocks_at_a_time() -> None:
    class Counting(Twin):
        held: ClassVar[set[Tag]] = set()
        most = 0

        def grant(
            self, tag: Tag, keys: bytes, private: bool, parent: bytes, position: int, mode: str, tenant: int = 0
        ) -> None:
            if mode == "staging":
                self.held.add(tag)
                Counting.most = max(Counting.most, len(self.held))
            self.real.grant(tag, keys, private, parent, position, mode, tenant)

        def end(self, tag: Tag) -> None:
            self.held.discard(tag)
            self.real.end(tag)

    with Cluster() as cluster:
        for node, name in (("a", "prefill"), ("b", "decode")):
            cluster.add_node(node, 256, backend())
            wrap = Counting if name == "prefill" else None
            cluster.add_worker(name, node, backend(), max_tokens=4096, wrap=wrap)
        request = cluster.submit(prompt(200 * 16 + 5), "prefill", "decode")
        cluster.run(request)
        assert request.ids == fake_tokens(prompt(200 * 16 + 5), 8)
        assert 1 < Counting.most <= kv_mover.STAGED_BLOCKS
        assert not Counting.held
        cluster.settle()


def test_aborts_and_preemptions_while_blocks_wait_to_be_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_mover, "STAGED_BLOCKS", 2)
    generator = random.Random(3)
    with two_nodes(slots=24, pages=24) as cluster:
        requests = [cluster.submit(prompt(150 + i, i), "prefill", "decode") for i in range(30)]
        victims = generator.sample(requests, 10)
        for victim in victims:
            for _ in range(generator.randrange(8)):
                cluster.step()
            cluster.abort(victim)
        kept = [request for request in requests if request not in victims]
        cluster.run(*kept)
        for request in kept:
            i = requests.index(request)
            assert request.ids == fake_tokens(prompt(150 + i, i), 8), request.failed
        cluster.settle()


def test_blocks_that_are_not_cached_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six blocks fill in one step: two fit the limit; and a pool too small refuses all of them at once."""
    with Cluster() as cluster:
        for node, slots in (("a", 64), ("b", 4)):
            cluster.add_node(node, slots, backend())
            cluster.add_worker(node, node, backend(), max_tokens=256)
        small = cluster.submit(prompt(100), "b", "b")
        cluster.run(small)
        cluster.settle()
        assert cluster.workers["b"].mover.counters["uncached_blocks"] == 6
        monkeypatch.setattr(kv_mover, "WRITE_THROUGH_BLOCKS", 2)
        large = cluster.submit(prompt(100), "a", "a")
        cluster.run(large)
        cluster.settle()
        counters = cluster.workers["a"].mover.counters
        assert (counters["stored_blocks"], counters["uncached_blocks"]) == (2, 4)
        assert cluster.counter("a", "pyengine_pool_blocks", state="cached") == 2


# -- daemons die ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_daemon_killed_mid_transfer(seed: int) -> None:
    """Blocks cross over TCP when either daemon dies; a fresh one takes its place; every request is answered whole."""
    generator = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [prompt(100 + i, i) for i in range(8)]
    blocks = sum(-(-len(ids) // 16) for ids in prompts)
    with two_nodes(slots=40, pages=40) as cluster:
        requests = [cluster.submit(ids, "prefill", "decode", sampling=sampling) for ids in prompts]
        moment = generator.randrange(1, blocks // 2)
        count: Callable[[], int] = lambda: cluster.counter(  # noqa: E731
            "b", "pyengine_transfer_blocks_total", direction="in"
        )
        cluster.until(lambda: count() >= moment)
        assert count() < blocks
        cluster.replace_daemon(generator.choice("ab"), 40)
        answers: list[dict[int, int]] = [{} for _ in prompts]
        retried = 0
        while any(request.finish is None for request in requests):
            cluster.run(*requests)
            for i, request in enumerate(requests):
                answers[i] |= request.tokens
                if request.failed is not None:
                    assert request.failed.kind == "retry"
                    retried += 1
                    held = [answers[i][k] for k in range(len(answers[i]))]
                    requests[i] = cluster.submit(
                        prompts[i] + held,
                        "prefill",
                        "decode",
                        sampling=sampling,
                        number=request.number,
                        attempt=request.attempt + 1,
                        generated=len(held),
                    )
                    assert request.attempt < 8, "it is retried for ever"
        assert retried
        for ids, answer, request in zip(prompts, answers, requests, strict=True):
            answer |= request.tokens
            assert [answer[k] for k in range(12)] == fake_tokens(ids, 12)
        works(cluster)
