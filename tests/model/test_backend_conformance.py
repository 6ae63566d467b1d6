"""Goal: every Backend keeps the contract of pyengine/backend.py, so that worker and cluster need not know which it is.

Method: a list of implementations (torch and JAX on a tiny random Llama, fake, each as if beside the host; torch behind
a conversion, as if with CUDA graphs, and over two processes; JAX over two devices) times a list of expectations.
Expectations compare the greedy continuation of a prompt computed in one way with the same computed in another: chunked,
batched, with KV that went out through `read_pages` and came back elsewhere through `write_pages`, with steps that are
submitted before the tokens they continue are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pyengine.backend import Backend, Pending, Slice
from pyengine.backends import lacking, load_backend
from pyengine.conversion import Converted
from pyengine.ranks import Ranked
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams
from tests.model.checkpoints import write_tiny
from tests.model.elsewhere import Elsewhere

GREEDY = SamplingParams(temperature=0.0)
PAGES = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


IMPLEMENTATIONS = [
    "torch",
    "torch:overlaps",
    "torch:converted",
    "torch:graphs",
    "torch:tp=2",
    "jax",
    "jax:overlaps",
    "jax:tp=2",
    "fake",
    "fake:overlaps=1",
]


@pytest.fixture(scope="module")
def spread(tiny: Path) -> Iterator[Callable[[str, int], Backend]]:
    """By framework and number: over two devices. Processes take long to start, so all expectations have the same ones,
    with what others have left in their pages.
    """
    made: dict[tuple[str, int], Backend] = {}

    def of(name: str, number: int) -> Backend:
        if (name, number) not in made:
            backend: Backend
            if name == "jax":  # this process has one device
                backend = Elsewhere(name, str(tiny), tiny.parent, tp=2)
            else:
                backend = load_backend(name, str(tiny), cache=tiny.parent, threads=1, tp=2)
            made[name, number] = backend
            backend.allocate(PAGES)
        return made[name, number]

    yield of
    for backend in made.values():
        backend.close()


@pytest.fixture(params=IMPLEMENTATIONS)
def make(
    request: pytest.FixtureRequest, tiny: Path, tmp_path: Path, spread: Callable[[str, int], Backend]
) -> Iterator[Callable[[], Backend]]:
    """Makes instances of the implementation, with pages."""
    name, _, way = request.param.partition(":")
    if reason := lacking(name):
        pytest.skip(reason)
    if way == "tp=2":
        # One of torch's is enough: what two would hand each other, their leaders alone have not.
        numbers = itertools.count() if name == "jax" else itertools.repeat(0)
        yield lambda: spread(name, next(numbers))
        return
    made: list[Backend] = []

    def make_one() -> Backend:
        model = request.param if name == "fake" else str(tiny)
        backend = load_backend(name, model, cache=tmp_path, threads=1)
        if way == "converted":
            # As at a decode worker, where what was converted comes as its own; what rounds: worker/test_conversion.py.
            backend = Converted(backend, "bfloat16", "float32")
        if way in ("overlaps", "graphs"):
            backend.overlaps = True  # as it does on accelerators: a step is begun when it is submitted
        backend.allocate(PAGES)
        if way == "graphs":
            from tests.model.graph_twin import with_graphs  # needs torch

            with_graphs(backend, 4)
        made.append(backend)
        return backend

    yield make_one
    for backend in made:
        backend.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng([length, seed]).integers(0, 256, length)]


def pages_for(length: int, first: int = 0) -> list[int]:
    """Enough pages for `length` tokens, in an order that is neither sorted nor contiguous."""
    count = -(-length // BLOCK_TOKENS)
    return [(first + 7 * index) % PAGES for index in reversed(range(count))]


def slice_of(tokens: list[int], start: int, pages: list[int], sampling: SamplingParams | None = GREEDY) -> Slice:
    return Slice(np.array(tokens, dtype=np.uint32), start, np.array(pages, dtype=np.int32), sampling)


def prefill(backend: Backend, tokens: list[int], pages: list[int], chunk: int, start: int = 0) -> int:
    """Computes tokens[start:] in chunks; returns the next token."""
    while start + chunk < len(tokens):
        assert backend.execute([slice_of(tokens[start : start + chunk], start, pages, None)]) == [-1]
        start += chunk
    return backend.execute([slice_of(tokens[start:], start, pages)])[0]


def decode(
    backend: Backend, first: int, length: int, count: int, pages: list[int], sampling: SamplingParams = GREEDY
) -> list[int]:
    """`count` tokens, of which `first` is known, after `length` positions."""
    out = [first]
    while len(out) < count:
        out += backend.execute([slice_of([out[-1]], length + len(out) - 1, pages, sampling)])
    return out


def strips(backend: Backend, pages: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    out = room_for(backend, pages)
    backend.read_pages(pages, out)
    return out


def room_for(
    backend: Backend, pages: list[int], layers: range | None = None
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Full of what is in no page."""
    count = len(strips_of(backend, layers))
    return np.full((len(pages), count, backend.namespace.kv.strip_bytes), 0xAB, dtype=np.uint8)


def strips_of(backend: Backend, layers: range | None = None) -> range:
    """Which of the strips that its pages hold are those of these layers, or of all."""
    spec = backend.namespace.kv
    part = spec.strips_of(range(spec.layers) if layers is None else layers)
    if not isinstance(backend, Ranked):
        return part
    heads = backend.heads
    return range(part.start * heads.count // heads.of, part.stop * heads.count // heads.of)


def baseline(backend: Backend, tokens: list[int], count: int = 12) -> list[int]:
    pages = pages_for(len(tokens) + count, first=3)
    return decode(backend, prefill(backend, tokens, pages, len(tokens)), len(tokens), count, pages)


def test_describes_itself(make: Callable[[], Backend]) -> None:
    backend = make()
    assert backend.vocab_size > 1
    assert backend.max_positions > 1
    assert backend.model
    assert backend.tokenizer
    assert all(0 <= token < backend.vocab_size for token in backend.eos_token_ids)
    assert backend.namespace.digest() == make().namespace.digest()


def test_an_empty_step_is_one(make: Callable[[], Backend]) -> None:
    assert make().execute([]) == []


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_chunks_do_not_change_the_answer(make: Callable[[], Backend], length: int, chunk: int) -> None:
    backend = make()
    tokens = prompt(length)
    pages = pages_for(length + 12)
    assert decode(backend, prefill(backend, tokens, pages, chunk), length, 12, pages) == baseline(backend, tokens)


def test_decoding_equals_prefilling_what_was_decoded(make: Callable[[], Backend]) -> None:
    backend = make()
    tokens = prompt(21)
    answer = baseline(backend, tokens)
    for cut in range(1, len(answer)):
        whole = tokens + answer[:cut]
        assert prefill(backend, whole, pages_for(len(whole)), len(whole)) == answer[cut]


def test_tokens_of_one_sequence_may_be_slices_behind_each_other(make: Callable[[], Backend]) -> None:
    """In one step each reads what those before it write; the KV is that of one slice, and so is the answer."""
    backend = make()
    tokens, first, other = prompt(41), pages_for(60), pages_for(60, 10)
    expected = prefill(backend, tokens, first, 100)
    prefill(backend, tokens[:7], other, 100)
    neighbour = slice_of(prompt(9, 3), 0, pages_for(20, 20))
    rows = [slice_of([token], at, other) for at, token in enumerate(tokens[7:], 7)]
    chosen = backend.execute([*rows[:20], neighbour, *rows[20:]])
    assert chosen[-1] == expected
    for at, token in enumerate([*chosen[:20], *chosen[21:-1]], 8):
        if at % 8 == 0:
            assert token == prefill(backend, tokens[:at], pages_for(60, 30), 100)
    assert decode(backend, expected, 41, 6, other) == decode(backend, expected, 41, 6, first)


def test_the_batch_does_not_change_the_answer(make: Callable[[], Backend]) -> None:
    """Prompts of very different lengths decode together while another is prefilled in chunks beside them."""
    backend = make()
    lengths = [1, 16, 40, 3, 111]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    expected = [baseline(backend, tokens) for tokens in prompts]
    late = prompt(70, 9)
    expected_late = baseline(backend, late, 1)

    free = iter(np.random.default_rng(0).permutation(PAGES).tolist())
    tables = [[next(free) for _ in pages_for(length + 12)] for length in lengths]
    late_pages = [next(free) for _ in pages_for(len(late))]
    answers = [[token] for token in backend.execute([slice_of(t, 0, p) for t, p in zip(prompts, tables, strict=True)])]
    for step in range(11):
        batch = [
            slice_of([answer[-1]], length + step, pages)
            for answer, length, pages in zip(answers, lengths, tables, strict=True)
        ]
        start = step * 7
        chunk = late[start : start + 7] if start < len(late) else []
        if chunk:
            batch.insert(step % 4, slice_of(chunk, start, late_pages, GREEDY if step == 9 else None))
        chosen = backend.execute(batch)
        if chunk:
            token = chosen.pop(step % 4)
            assert token == (expected_late[0] if step == 9 else -1)
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
    assert answers == expected


def test_kv_moves_to_other_pages_and_instances(make: Callable[[], Backend]) -> None:
    """A prefix computed here continues there, from strips alone; the partial last page too."""
    source = make()
    if isinstance(source, Ranked):
        pytest.skip("what one process reads and writes are its own heads only; all: worker/test_ranks.py")
    target = make()
    tokens = prompt(75)
    expected = baseline(source, tokens)
    pages = pages_for(len(tokens) + 12)
    first = prefill(source, tokens, pages, 32)
    used = pages[: -(-len(tokens) // BLOCK_TOKENS)]
    moved = strips(source, used)
    for backend in (source, target):
        others = pages_for(len(tokens) + 12, first=5)
        backend.write_pages(others[: len(used)], moved)
        assert np.array_equal(strips(backend, others[: len(used)]), moved)
        assert decode(backend, first, len(tokens), 12, others) == expected


def test_a_reused_prefix_is_not_computed_again(make: Callable[[], Backend]) -> None:
    """Another prompt with the same first blocks starts behind them, on the same pages."""
    backend = make()
    shared, tail = prompt(48), prompt(30, 1)
    expected = baseline(backend, shared + tail)
    pages = pages_for(48 + 30 + 12)
    prefill(backend, shared, pages, 48)
    before = strips(backend, pages[:3])
    first = prefill(backend, shared + tail, pages, 16, start=48)
    assert decode(backend, first, 78, 12, pages) == expected
    assert np.array_equal(strips(backend, pages[:3]), before)


def test_read_only_strips_are_taken(make: Callable[[], Backend]) -> None:
    backend = make()
    prefill(backend, prompt(16), [0], 16)
    out = strips(backend, [0])
    out.flags.writeable = False
    backend.write_pages([5], out)
    assert np.array_equal(strips(backend, [5]), out)


def test_garbage_behind_the_tokens_does_not_leak(make: Callable[[], Backend]) -> None:
    """Every page is full of 0xFF (NaN in every float type) before use, and so is the tail of a page that is written."""
    backend = make()
    tokens = prompt(40)
    expected = baseline(backend, tokens)
    everywhere = list(range(PAGES))
    backend.write_pages(everywhere, np.full_like(room_for(backend, everywhere), 0xFF))
    assert baseline(backend, tokens) == expected

    pages = pages_for(len(tokens) + 12, first=2)
    first = prefill(backend, tokens, pages, 40)
    poisoned = strips(backend, pages[:3])
    poisoned.reshape(*poisoned.shape[:2], BLOCK_TOKENS, -1)[2, :, 8:] = 0xFF
    backend.write_pages(pages[:3], poisoned)
    assert decode(backend, first, len(tokens), 12, pages) == expected


def test_a_changed_strip_changes_what_follows(make: Callable[[], Backend]) -> None:
    """The KV is really read from the pages: swapping two full pages of a prefix changes the KV computed after it."""
    backend = make()
    tokens = prompt(64)
    pages = pages_for(65)
    prefill(backend, tokens, pages, 64)
    moved = strips(backend, pages[:4])
    outcomes = []
    for order in ([0, 1, 2, 3], [1, 0, 2, 3]):
        backend.write_pages(pages[:4], moved[order])
        backend.execute([slice_of([7], 64, pages)])
        outcomes.append((strips(backend, pages[4:5]).tobytes(), backend.execute([slice_of([7], 64, pages)])))
    assert outcomes[0] != outcomes[1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=6),
    ],
)
def test_seeded_sampling_depends_on_seed_and_position_alone(
    make: Callable[[], Backend], sampling: SamplingParams
) -> None:
    backend = make()
    tokens = prompt(20)
    pages = pages_for(40)

    def answer(params: SamplingParams, beside: bool) -> list[int]:
        slices = [slice_of(tokens, 0, pages, params)]
        if beside:
            slices.insert(0, slice_of(prompt(9), 0, [60], GREEDY))
        first = backend.execute(slices)[-1]
        return decode(backend, first, 20, 20, pages, params)

    one = answer(sampling, beside=False)
    assert answer(sampling, beside=True) == one
    assert all(0 <= token < backend.vocab_size for token in one)
    assert answer(SamplingParams(temperature=sampling.temperature, seed=99), beside=False) != one


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=6)])
def test_a_step_goes_on_from_tokens_of_the_one_before(make: Callable[[], Backend], sampling: SamplingParams) -> None:
    """Two prompts decode with one step always under way; the rows change places, and one prompt comes in chunks."""
    backend = make()
    prompts = [prompt(21), prompt(40)]
    tables = [pages_for(21 + 12), pages_for(40 + 12, first=PAGES // 2)]
    expected = [
        decode(backend, backend.execute([slice_of(tokens, 0, pages, sampling)])[0], len(tokens), 8, pages, sampling)
        for tokens, pages in zip(prompts, tables, strict=True)
    ]

    answers: list[list[int]] = [[], []]
    # Who has which row of the step that was submitted last, and how many tokens each has by then.
    rows = [0]
    counts = [1, 0]
    before = backend.submit([slice_of(prompts[0], 0, tables[0], sampling)]), rows
    for step in range(9):
        rows, slices = ([0, 1] if step % 2 else [1, 0]), []
        for who in rows:
            if step < 2 and who == 1:
                chunk = prompts[1][:25] if step == 0 else prompts[1][25:]
                start = 0 if step == 0 else 25
                slices.append(slice_of(chunk, start, tables[1], sampling if step else None))
                continue
            last = len(prompts[who]) + counts[who] - 1
            slice_ = slice_of([0], last, tables[who], sampling)
            slices.append(msgspec.structs.replace(slice_, after=before[1].index(who)))
        for who in rows:
            counts[who] += who == 0 or step > 0
        pending = backend.submit(slices)
        take(answers, before)
        before = pending, rows
    take(answers, before)
    assert [answer[:8] for answer in answers] == expected


def take(answers: list[list[int]], step: tuple[Pending, list[int]]) -> None:
    """Waits for a step whose rows belong to these answers."""
    pending, rows = step
    tokens = pending.tokens()
    assert len(tokens) == len(rows)
    for who, token in zip(rows, tokens, strict=True):
        answers[who] += [token] if token >= 0 else []


def test_other_pages_are_copied_beside_a_step(make: Callable[[], Backend]) -> None:
    """What is asked for while a step is under way is what it would be after it."""
    backend = make()
    tokens, other = prompt(48), prompt(30, 1)
    expected = baseline(backend, other)
    prefill(backend, tokens, [0, 1, 2], 48)
    before = strips(backend, [0, 1, 2])
    pages = [pages_for(42, first=5), pages_for(42, first=9)]
    pending = backend.submit([slice_of(other, 0, pages[0])])
    assert np.array_equal(strips(backend, [0, 1, 2]), before)
    backend.write_pages([20, 21, 22], before)
    first = pending.tokens()[0]
    assert decode(backend, first, 30, 12, pages[0]) == expected
    assert np.array_equal(strips(backend, [20, 21, 22]), before)


def test_a_step_that_fails_is_the_only_one(make: Callable[[], Backend]) -> None:
    """Pages that do not exist, or are too few, fail when a step is submitted or waited for; the next one is right."""
    backend = make()
    tokens = prompt(20)
    expected = baseline(backend, tokens, 1)
    with pytest.raises((IndexError, ValueError)):
        backend.submit([slice_of(prompt(16), 0, [PAGES + 5])]).tokens()
    with pytest.raises((IndexError, ValueError)):
        backend.submit([slice_of(tokens, 0, [3, 4]), slice_of(prompt(17), 0, [5])]).tokens()
    assert baseline(backend, tokens, 1) == expected


def test_pages_are_allocated_once(make: Callable[[], Backend]) -> None:
    with pytest.raises(RuntimeError, match="once"):
        make().allocate(1)


def test_unknown_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="known: torch, jax, fake"):
        load_backend("tensorflow", "fake", cache=tmp_path)


def test_a_layer_is_told_of_when_it_can_be_read(make: Callable[[], Backend]) -> None:
    """What is read of a layer when it is told of is what is read after the step; one that tells of none never calls."""
    backend = make()
    spec = backend.namespace.kv
    tokens, pages = prompt(40), pages_for(40)
    told: list[int] = []
    parts = []

    def written(layer: int) -> None:
        layers = range(layer, layer + 1)
        out = room_for(backend, pages, layers)
        backend.read_pages(pages, out, layers)
        told.append(layer)
        parts.append(out)

    chosen = backend.submit([slice_of(tokens, 0, pages)], written).tokens()
    assert chosen == baseline(backend, tokens, 1)
    whole = strips(backend, pages)
    if backend.layerwise:
        assert told == list(range(spec.layers))
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    else:
        assert not told
    for layers in (range(spec.layers), range(1, spec.layers)):
        part, out = strips_of(backend, layers), room_for(backend, pages, layers)
        backend.read_pages(pages, out, layers)
        np.testing.assert_array_equal(out, whole[:, part.start : part.stop])


def test_layers_are_asked_for_before_they_are_computed(make: Callable[[], Backend]) -> None:
    """A layerwise backend goes on from pages that get what they should hold as it asks for each layer; what is raised
    there, the step raises.
    """
    backend = make()
    if not backend.layerwise:
        pytest.skip("it asks for no layers")
    spec = backend.namespace.kv
    tokens, pages = prompt(48 + 9), pages_for(48 + 9)
    expected = baseline(backend, tokens, 1)
    prefill(backend, tokens[:48], pages, 48)
    used = pages[:3]
    before = strips(backend, used)
    backend.write_pages(used, np.full_like(before, 0xFF))
    asked: list[int] = []

    def readable(layer: int) -> None:
        if asked != list(range(layer)):
            raise ValueError(f"{layer} is asked for behind {asked}")
        layers = range(layer, layer + 1)
        part = spec.strips_of(layers)
        written = before[:, part.start : part.stop]
        backend.write_pages(used, np.ascontiguousarray(written), layers)
        asked.append(layer)

    assert backend.submit([slice_of(tokens[48:], 48, pages)], None, readable).tokens() == expected
    assert asked == list(range(spec.layers))
    assert np.array_equal(strips(backend, used), before)

    # What is asked for by a step that has failed is nobody's any more.
    with pytest.raises(ValueError, match="0 is asked for behind"):
        backend.submit([slice_of(tokens[48:], 48, pages)], None, readable).tokens()
    assert backend.execute([slice_of(tokens[48:], 48, pages)]) == expected
