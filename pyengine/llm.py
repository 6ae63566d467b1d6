"""`LLM`: the worker's loop, role both, stepped by the caller over an embedded pool. No conductor, no sockets."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from pyengine import _native, env
from pyengine.backends import load_backend
from pyengine.config import WorkerConfig, default_pool_bytes
from pyengine.scheduler.messages import Abort, Failed, PrefillReport, Tokens, Work
from pyengine.scheduler.types import FinishReason, Node, Role, SamplingParams
from pyengine.text import Detokenizer, Tokenizer
from pyengine.worker.core import Worker

Prompt = str | Sequence[int]


class Completion(msgspec.Struct, frozen=True):
    """What one prompt led to. finish_reason: "stop" (end token or stop string) or "length".

    cached_tokens: prompt tokens whose KV was reused. recomputed_tokens: positions computed a second time.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int


class LLM:
    """A model in this process.

    Args:
        model: name ("smollm2"), Hugging Face folder, GGUF file or hub name.
        backend: "torch" or "fake".
        dram_bytes: host memory for reusable KV; kv_bytes: device memory for the pages of running requests.
        state_dir: where converted checkpoints are kept (default: see pyengine/env.py).
        threads: of the backend; None: its own choice.
        max_tokens_per_step, max_sequences: see pyengine.config.WorkerConfig.

    Raises:
        ValueError: no such model, or it cannot be served; the text says what to do.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        backend: str = "torch",
        dram_bytes: int | None = None,
        kv_bytes: int | None = None,
        pages: int = 0,
        state_dir: Path | None = None,
        threads: int | None = None,
        max_tokens_per_step: int = 512,
        max_sequences: int = 32,
    ) -> None:
        cache = (state_dir or env.read().state_dir) / "models"
        self._backend = load_backend(backend, model, cache=cache, threads=threads)
        self._tokenizer = Tokenizer.load(self._backend.tokenizer)
        spec = self._backend.namespace.kv
        config = WorkerConfig(
            worker="llm",
            role=Role.BOTH,
            node="llm",
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
        self._hash_key = secrets.token_bytes(32)
        incarnation = secrets.randbits(63)
        self._daemon = _native.Daemon(
            node="llm", dram_bytes=dram_bytes or default_pool_bytes(), session_key=secrets.token_bytes(32)
        )
        self._pool = self._daemon.attach(incarnation, spec.strips, spec.strip_bytes)
        self._worker = Worker(
            "llm",
            self._backend,
            pages=count,
            max_tokens=max_tokens_per_step,
            max_sequences=max_sequences,
            max_queue=1 << 30,
            hash_key=self._hash_key,
            incarnation=incarnation,
        )
        self._worker.attach(self._pool)
        self._node = Node("llm", "", self._daemon.address.incarnation)
        self._root = _native.root_key(self._worker.namespace, b"", b"", self._hash_key)
        self._requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def counters(self) -> dict[str, int]:
        """Tokens the worker computed or reused so far, and what its KV mover did, by name."""
        return self._worker.counters | self._worker.mover.counters

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completes each prompt (text, or token ids); all run together. One SamplingParams for all, or one each.

        Raises:
            ValueError: an empty prompt, one longer than the model or its KV space, or a wrong number of params.
        """
        batch = _as_batch(prompts)
        params = [sampling or SamplingParams()] * len(batch) if not isinstance(sampling, Sequence) else list(sampling)
        if len(params) != len(batch):
            raise ValueError(
                f"{len(batch)} prompts and {len(params)} sampling parameters: give one for all, or one each"
            )
        running = {}
        try:
            for prompt, each in zip(batch, params, strict=True):
                request = self._submit(self._ids(prompt), each)
                running[request.number] = request
            self._run(running)
        finally:
            for number in running:
                self._worker.abort(Abort(request=number, attempt=1))
        return [request.completion() for request in running.values()]

    def chat(self, messages: Sequence[dict[str, str]], sampling: SamplingParams | None = None) -> Completion:
        """Completes one conversation through the model's chat template: [{"role": "user", "content": "..."}]."""
        return self.generate(self._tokenizer.chat(list(messages)), sampling)[0]

    def close(self) -> None:
        """Frees the model and the pool. Idempotent."""
        self._worker.mover.close()
        self._daemon.stop()
        self._backend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> list[int]:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise ValueError("a prompt is empty: give at least one token")
        if not all(0 <= token < self._backend.vocab_size for token in ids):
            raise ValueError(f"token ids must be between 0 and {self._backend.vocab_size - 1}")
        return ids

    def _submit(self, ids: list[int], sampling: SamplingParams) -> _Request:
        self._requests += 1
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(62)
        tokens = np.asarray(ids, np.uint32)
        work = Work(
            request=self._requests,
            attempt=1,
            part="both",
            token_ids=tokens.tobytes(),
            generated=0,
            root=self._root,
            keys=_native.block_keys(tokens, self._worker.block_tokens, self._root, self._hash_key),
            sampling=msgspec.structs.replace(sampling, seed=seed),
            namespace=self._worker.namespace,
            decode_node=self._node,
            decode_incarnation=0,
        )
        self._worker.accept(work)
        return _Request(self._requests, len(ids), Detokenizer(self._tokenizer, sampling.stop))

    def _run(self, running: dict[int, _Request]) -> None:
        while any(request.finish is None for request in running.values()):
            for message in self._worker.step():
                match message:
                    case Tokens() if message.request in running:
                        if running[message.request].take(message):
                            self._worker.abort(Abort(request=message.request, attempt=1))
                    case PrefillReport() if message.request in running:
                        running[message.request].cached = message.cached
                    case Failed() if message.kind == "too_large":
                        raise ValueError(message.reason)
                    case Failed():
                        raise RuntimeError(f"request {message.request} failed: {message.reason}")
            if not self._worker.busy:
                self._pool.wait(1.0)


class _Request:
    """One prompt of a `generate` call on its way."""

    def __init__(self, number: int, prompt_tokens: int, text: Detokenizer) -> None:
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.cached = 0
        self.ids: list[int] = []
        self.finish: FinishReason | None = None
        self._text = text
        self._parts: list[str] = []

    def take(self, message: Tokens) -> bool:
        """Adds tokens; True if a stop string ends the request before the worker knows."""
        if self.finish is not None:
            return False
        self.ids += message.tokens
        self._parts.append(self._text.push(list(message.tokens)))
        if self._text.stopped:
            self.finish = FinishReason.STOP
            return message.finish is None
        self.finish = message.finish
        if self.finish is not None:
            self._parts.append(self._text.finish())
        return False

    def completion(self) -> Completion:
        assert self.finish is not None, "generate returns when all have finished"
        return Completion("".join(self._parts), self.ids, self.finish.value, self.prompt_tokens, self.cached)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, or one (a text, or a sequence of ids) as a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [prompt for prompt in prompts if isinstance(prompt, int)]
    if ids:
        return [ids]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]
