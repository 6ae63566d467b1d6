"""`LLM`: the worker's loop, role both, stepped by the caller over an embedded pool. No conductor, no sockets."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from pyengine import _native, env
from pyengine.backends import MAX_SEQUENCES, MAX_TOKENS, load_backend
from pyengine.config import WorkerConfig, check_ssd, default_pool_bytes, parse_size
from pyengine.scheduler.messages import Abort, Failed, PrefillReport, Tokens, Work
from pyengine.scheduler.types import FinishReason, Logprobs, Node, Role, SamplingParams
from pyengine.secret import claim_ssd, read_secret, secret_file
from pyengine.text import Detokenizer, Tokenizer
from pyengine.worker.core import Worker

Prompt = str | Sequence[int]

NEVER = float("inf")
#: Name of the node that is this process, and of its folder on SSD.
NODE = "llm"


class Completion(msgspec.Struct, frozen=True):
    """What one prompt led to. finish_reason: "stop" (end token or stop string) or "length".

    cached_tokens: prompt tokens whose KV was reused. cached_by_tier: where that was found ("device", "dram", "ssd").
    logprobs: one for each token, if `SamplingParams.logprobs` asked for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    logprobs: list[Logprobs] | None = None


class LLM:
    """A model in this process. One thread at a time may use it.

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
            self._pages = count
            self._max_tokens = max_tokens_per_step
            self._max_sequences = max_sequences
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
            self._worker, self._pool = self._new_worker()
            failed.pop_all()
        self._node = Node(NODE, "", self._daemon.address.incarnation)
        self._root = _native.root_key(self._worker.namespace, b"", b"", self._hash_key)
        self._requests = 0
        self._interrupted = False
        self._closed = False

    def _new_worker(self) -> tuple[Worker, _native.PoolClient]:
        incarnation = secrets.randbits(63)
        worker = Worker(
            "llm",
            self._backend,
            pages=self._pages,
            max_tokens=self._max_tokens,
            max_sequences=self._max_sequences,
            max_queue=1 << 30,
            hash_key=self._hash_key,
            incarnation=incarnation,
        )
        spec = self._backend.namespace.kv
        pool = self._daemon.attach(incarnation, spec.strips, spec.strip_bytes, self._backend.namespace.owner())
        worker.attach(pool)
        return worker, pool

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

        Whatever it raises (Ctrl-C too), nothing of the call goes on, and the next call works.

        Raises:
            ValueError: an empty prompt, one longer than the model or its KV space, or a wrong number of params.
            RuntimeError: it is closed, or the model failed.
        """
        if self._closed:
            raise RuntimeError("this LLM is closed: make a new one")
        batch = [self._ids(prompt) for prompt in _as_batch(prompts)]
        params = [sampling or SamplingParams()] * len(batch) if not isinstance(sampling, Sequence) else list(sampling)
        if len(params) != len(batch):
            raise ValueError(
                f"{len(batch)} prompts and {len(params)} sampling parameters: give one for all, or one each"
            )
        if any(token >= self._backend.vocab_size for each in params for token, _ in each.logit_bias):
            raise ValueError(f"logit_bias names an id that is not below {self._backend.vocab_size}")
        for grammar in {each.grammar for each in params if each.grammar is not None}:
            self._worker.grammars.prepare(grammar).result()
        if self._interrupted or self._worker.mover.pool is None:
            self._renew()
        self._interrupted = True
        requests = [self._submit(ids, each) for ids, each in zip(batch, params, strict=True)]
        failure = self._run({request.number: request for request in requests})
        for request in requests:
            self._worker.abort(Abort(request=request.number, attempt=1))
        self._worker.mover.flush()
        self._worker.take_ended()
        self._interrupted = False
        if failure is not None:
            raise failure
        return [request.completion() for request in requests]

    def _renew(self) -> None:
        """Replaces the worker: the last call was broken off at a place where its books need not agree.

        The pool survives, and what is cached there.
        """
        old = self._worker
        old.close()
        fresh, pool = self._new_worker()
        fresh.counters, fresh.mover.counters = old.counters, old.mover.counters
        self._worker, self._pool = fresh, pool

    def chat(self, messages: Sequence[dict[str, str]], sampling: SamplingParams | None = None) -> Completion:
        """Completes one conversation through the model's chat template: [{"role": "user", "content": "..."}]."""
        return self.generate(self._tokenizer.chat(list(messages)), sampling)[0]

    def close(self) -> None:
        """Frees the model and the pool. Idempotent."""
        self._closed = True
        self._worker.close()
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
        keys = _native.block_keys(tokens, self._worker.block_tokens, self._root, self._hash_key)
        work = Work(
            request=self._requests,
            attempt=1,
            part="both",
            token_ids=tokens.tobytes(),
            generated=0,
            root=self._root,
            keys=keys,
            sampling=msgspec.structs.replace(sampling, seed=seed),
            namespace=self._worker.namespace,
            decode_node=self._node,
            decode_incarnation=0,
            deadline=NEVER,
        )
        if sampling.grammar is not None:  # of many in one batch the first may be forgotten by now
            self._worker.grammars.prepare(sampling.grammar).result()
        self._worker.accept(work)
        text = Detokenizer(self._tokenizer, sampling.stop, sampling.min_tokens)
        return _Request(self._requests, len(ids), sampling, text)

    def _run(self, running: dict[int, _Request]) -> Exception | None:
        """Steps until all have finished, or one has failed: then why."""
        while any(request.finish is None for request in running.values()):
            for message in self._worker.step():
                match message:
                    case Tokens() if message.request in running:
                        if running[message.request].take(message):
                            self._worker.abort(Abort(request=message.request, attempt=1))
                    case PrefillReport() if message.request in running:
                        running[message.request].report = message
                    case Failed() if message.kind in ("too_large", "refused"):
                        return ValueError(message.reason)
                    case Failed():
                        return RuntimeError(f"a request failed: {message.reason}")
            if not self._worker.busy and self._worker.mover.pool is not None:
                self._pool.wait(1.0)
        return None


class _Request:
    """One prompt of a `generate` call on its way."""

    def __init__(self, number: int, prompt_tokens: int, sampling: SamplingParams, text: Detokenizer) -> None:
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.report: PrefillReport | None = None
        self.ids: list[int] = []
        self.logprobs: list[Logprobs] | None = None if sampling.logprobs is None else []
        self.finish: FinishReason | None = None
        self._text = text
        self._parts: list[str] = []

    def take(self, message: Tokens) -> bool:
        """Adds tokens; True if a stop string ends the request before the worker knows."""
        if self.finish is not None:
            return False
        self.ids += message.tokens
        if self.logprobs is not None:
            self.logprobs += message.logprobs or ()
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
        cached, tiers = (self.report.cached, self.report.tiers) if self.report else (0, {})
        text, finish = "".join(self._parts), self.finish.value
        return Completion(text, self.ids, finish, self.prompt_tokens, cached, tiers, self.logprobs)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, or one (a text, or a sequence of ids) as a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [int(prompt) for prompt in prompts if isinstance(prompt, int | np.integer)]
    many: list[Prompt] = [prompt for prompt in prompts if not isinstance(prompt, int | np.integer)]
    if ids and many:
        raise ValueError("token ids and prompts are mixed: give one prompt as ids, or a list of prompts")
    return [ids] if ids else many
