"""`LLM`: a model in this process, asked in text and answering in it. The engine's thread computes (engine.py)."""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from pyengine import _native, env
from pyengine.backend import Backend
from pyengine.backends import MAX_SEQUENCES, MAX_TOKENS, load_backend
from pyengine.chat.structured import StructuredOutputs
from pyengine.config import WorkerConfig, check_ssd, default_pool_bytes, parse_size
from pyengine.llm.asking import Asked, Asker, Conversation, Prompt, Tools, as_batch
from pyengine.llm.engine import Engine
from pyengine.llm.request import Completion, Piece, Request
from pyengine.scheduler.types import Node, Role, SamplingParams
from pyengine.secret import claim_ssd, read_secret, secret_file
from pyengine.text import Tokenizer
from pyengine.worker.core import Worker

#: Name of the node that is this process, and of its folder on SSD.
NODE = "llm"


class LLM:
    """A model in this process. Threads may share it: what they ask for is computed together, on a thread of its own.

    Args:
        model: name ("smollm2"), Hugging Face folder, GGUF file or hub name.
        backend: "torch", "jax" or "fake".
        dtype: "float32", "bfloat16", or "auto": float32 on CPUs, bfloat16 on accelerators.
        tp: over how many processes (torch) or devices (jax) each layer is spread.
        dram_bytes: host memory for reusable KV; kv_bytes: device memory for the pages of running requests; pages:
            their number instead.
        ssd_dir, ssd_bytes: where KV is kept that the next LLM of the same model and state_dir finds again, and how much
            (bytes, or "10GiB"). Default: nowhere.
        state_dir: where converted checkpoints and the secret of what is on SSD are kept (default: see pyengine/env.py).
        threads: of the backend, in all; None: its own choice.
        max_tokens_per_step, max_sequences: see pyengine.config.WorkerConfig.

    Raises:
        ValueError: no such model, or it cannot be served, or nothing can be kept in ssd_dir (in use by another, say);
            the text says what to do.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        backend: str = "torch",
        dtype: str = "auto",
        tp: int = 1,
        dram_bytes: int | None = None,
        ssd_dir: Path | str | None = None,
        ssd_bytes: int | str = 0,
        kv_bytes: int | None = None,
        pages: int = 0,
        state_dir: Path | None = None,
        threads: int | None = None,
        max_tokens_per_step: int = MAX_TOKENS,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        state_dir = state_dir or env.read().state_dir
        self._ssd = str(Path(ssd_dir).absolute() / NODE) if ssd_dir is not None else None
        self._hash_key = secrets.token_bytes(32)
        size = parse_size(ssd_bytes)
        check_ssd(self._ssd or "", size)
        if ssd_dir is not None:
            secret = secret_file(state_dir)
            claim_ssd(Path(ssd_dir).absolute(), secret)
            self._hash_key = _native.derive_key(read_secret(secret), "hash")
        self._backend = load_backend(backend, model, cache=state_dir / "models", threads=threads, dtype=dtype, tp=tp)
        with contextlib.ExitStack() as failed:
            failed.callback(self._backend.close)  # its other processes, if it has some, would else live on
            self._tokenizer = Tokenizer.load(self._backend.tokenizer)
            spec = self._backend.namespace.kv
            config = WorkerConfig(
                worker="llm",
                role=Role.BOTH,
                node=NODE,
                daemon_socket="",
                conductor="",
                work_endpoint="",
                secret_file="",
                model=model,
                backend=backend,
                state_dir="",
                kv_bytes=kv_bytes or default_pool_bytes(),
                pages=pages,
                max_tokens_per_step=max_tokens_per_step,
                max_sequences=max_sequences,
            )
            count = config.device_pages(spec.block_bytes, spec.block_tokens, self._backend.max_positions)
            self._backend.allocate(count)
            try:
                self._daemon = _native.Daemon(
                    node=NODE,
                    dram_bytes=dram_bytes or default_pool_bytes(),
                    session_key=secrets.token_bytes(32),
                    ssd_dirs=[self._ssd] if self._ssd else [],
                    ssd_bytes=size,
                )
            except _native.GiveUpError as error:
                # Of what can be refused here only settings are left: an SSD directory in use, or of a newer version.
                raise ValueError(str(error)) from error
            node = Node(NODE, "", self._daemon.address.incarnation)
            made = _worker_maker(
                *(self._backend, self._daemon, self._hash_key), count, max_tokens_per_step, max_sequences
            )
            self._engine = Engine(made, self._backend, node, self._hash_key)
            failed.pop_all()
        self._asker = Asker(self._tokenizer, self._backend.vocab_size)
        # One that nobody has closed ends with its last user, at the latest before the interpreter does.
        self._ends = weakref.finalize(self, _close, self._engine, self._daemon, self._backend)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def counters(self) -> dict[str, int]:
        """Tokens the worker computed or reused so far, and what its KV mover did, by name."""
        return self._engine.worker.counters | self._engine.worker.mover.counters

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        output: Any = None,
        structured: StructuredOutputs | None = None,
    ) -> list[Completion]:
        """Completes each prompt (text, or token ids); all run together. One SamplingParams for all, or one each.

        Whatever it raises (Ctrl-C too), nothing of the call goes on, and the next call works.

        Args:
            output: a type (msgspec.Struct, dataclass, TypedDict, pydantic model, list[int]...): the answer is JSON of
                its schema, and parsed as `Completion.output`.
            structured: another form of the answer: a JSON schema, a regex, a choice, a grammar.

        Raises:
            ValueError: an empty prompt, one longer than the model or its KV space, a wrong number of params, or a form
                that cannot be followed.
            RuntimeError: it is closed, or the model failed.
        """
        batch = as_batch(prompts)
        asked = self._asker.prompts(batch, sampling, output=output, structured=structured)
        return self._answer(asked)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: str | None = None,
        output: Any = None,
        structured: StructuredOutputs | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: str | None = None,
        output: Any = None,
        structured: StructuredOutputs | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: str | None = None,
        output: Any = None,
        structured: StructuredOutputs | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Completion | list[Completion]:
        """Answers one conversation, [{"role": "user", "content": "..."}], or each of several; all run together.

        Args:
            tools: functions of yours (hints and docstrings say what they take), or OpenAI's descriptions. What the
                model wants called is in `Completion.tool_calls`; nothing is called here.
            tool_choice: "auto", "none", "required", or the name of the one that must be called.
            output, structured: as in `generate`; they are about the answer, not about reasoning before it.
            template_options: handed to the chat template, as in {"enable_thinking": False}.

        Raises:
            ValueError: as `generate`; also messages or tools that nobody can make a prompt of.
            RuntimeError: it is closed, or the model failed.
        """
        one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if one else list(messages)
        asked = self._asker.conversations(
            conversations,  # type: ignore[arg-type]  # `one` says which it is
            sampling,
            tools=tools,
            tool_choice=tool_choice,
            output=output,
            structured=structured,
            options=template_options,
        )
        answers = self._answer(asked)
        return answers[0] if one else answers

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        output: Any = None,
        structured: StructuredOutputs | None = None,
    ) -> Stream:
        """Completes one prompt, piece by piece as text becomes certain. Arguments and errors: see `generate`."""
        (asked,) = self._asker.prompts([prompt], sampling, output=output, structured=structured)
        return Stream(self, asked)

    def stream_chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: str | None = None,
        output: Any = None,
        structured: StructuredOutputs | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Answers one conversation, piece by piece. Arguments and errors: see `chat`."""
        (asked,) = self._asker.conversations(
            [messages],
            sampling,
            tools=tools,
            tool_choice=tool_choice,
            output=output,
            structured=structured,
            options=template_options,
        )
        return Stream(self, asked)

    def close(self) -> None:
        """Ends what runs, and frees the model and the pool. Idempotent."""
        self._ends()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, asked: list[Asked]) -> list[Completion]:
        """Waits for all, or for the first that fails: then the others are ended."""
        news = threading.Event()
        requests = [each.request(news.set) for each in asked]
        begin(self._engine, requests)
        try:
            while not (all(request.ended for request in requests) or any(request.error for request in requests)):
                news.wait()
                news.clear()
            for request in requests:
                if request.error is not None:
                    raise request.error
        finally:
            self._engine.cancel(requests)
            self._engine.settle()
        return [each.completion(request) for each, request in zip(asked, requests, strict=True)]


def _worker_maker(
    backend: Backend, daemon: _native.Daemon, hash_key: bytes, pages: int, max_tokens: int, max_sequences: int
) -> Callable[[], tuple[Worker, _native.PoolClient]]:
    """What makes the engine's workers. It knows nothing of the LLM, which else would live as long as the thread."""

    def made() -> tuple[Worker, _native.PoolClient]:
        incarnation = secrets.randbits(63)
        worker = Worker(
            "llm",
            backend,
            pages=pages,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_queue=1 << 30,
            hash_key=hash_key,
            incarnation=incarnation,
        )
        spec = backend.namespace.kv
        pool = daemon.attach(incarnation, spec.strips, spec.strip_bytes, backend.namespace.owner())
        worker.attach(pool)
        return worker, pool

    return made


def _close(engine: Engine, daemon: _native.Daemon, backend: Backend) -> None:
    engine.close()
    daemon.stop()
    backend.close()


def begin(engine: Engine, requests: Sequence[Request]) -> None:
    """Compiles their grammars, then submits them together."""
    for grammar in {each.sampling.grammar for each in requests if each.sampling.grammar is not None}:
        engine.prepare(grammar)
    engine.submit(requests)


class Stream(Iterator[Piece]):
    """Pieces of one answer, as they come. One thread at a time may use it.

    Who stops early closes it, or leaves its `with`: the answer ends and all that it held is released. One that nobody
    holds any more is closed too.
    """

    def __init__(self, llm: LLM, asked: Asked) -> None:
        #: Which is not to end before its stream.
        self._llm = llm
        self._engine = engine = llm._engine
        self._asked = asked
        self._news = threading.Event()
        self._request = asked.request(self._news.set, streamed=True)
        begin(engine, [self._request])

    def __next__(self) -> Piece:
        """Raises RuntimeError or ValueError if the request fails."""
        request = self._request
        while True:
            ended = request.ended
            if request.pieces:
                return request.pieces.popleft()
            if ended:
                if request.error is not None:
                    raise request.error
                raise StopIteration
            self._news.wait()
            self._news.clear()

    def completion(self) -> Completion:
        """The whole answer, waiting for its end if need be. Raises RuntimeError if it was closed before."""
        while not self._request.ended:
            self._news.wait()
            self._news.clear()
        # Whoever iterates afterwards finds what is left.
        self._news.set()
        return self._asked.completion(self._request)

    def close(self) -> None:
        """Ends the answer. Idempotent."""
        self._engine.cancel([self._request])

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_request"):
            self.close()
