"""A worker's steps: the production Batcher plans them, `StepTime` says how long they take.

Fast-forward: while the Batcher says that its steps are all alike, they are computed at once. Whatever touches the
worker in the middle of that cuts it at the step under way, and nobody can see that it was computed in one go: the same
floats are added in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..batcher import Batcher, Outcome, Sequence, SequenceId, Step
from .compute import StepTime
from .engine import Loop
from .jobs import Job, token

#: Steps computed at once, at most.
LONGEST_RUN = 1 << 12
#: As `pyengine/worker/core.py` has it: what a decode worker computes again of a hand-off, in steps.
RECOMPUTE_STEPS = 4


@dataclass(slots=True, eq=False)
class Run:
    """Equal steps computed at once: when each ends, and who is in them."""

    began: float
    ends: npt.NDArray[np.float64]
    jobs: list[Job]


class Steps(ABC):
    """ends: when steps ended, in order. steps: begun so far. jobs: all that are in the Batcher, and others.

    stages: nodes that compute a chunk one after the other, each its share of the layers; the first is free for the next
    chunk as soon as it has passed its own on. An answer's next token waits for the one before to leave the last.
    overhead: seconds of each step that nothing is computed in.
    """

    batcher: Batcher

    def __init__(
        self, loop: Loop, number: int, time: StepTime, stages: int, *, overhead: float, fast_forward: bool
    ) -> None:
        self.loop = loop
        self.number = number
        self.time = time
        self.stages = stages
        self.overhead = overhead
        self.alive = True
        self.ends = array("d")
        self.steps = 0
        self.jobs: dict[SequenceId, Job] = {}
        self._fast_forward = fast_forward
        self._turn = 0
        self._planning = False
        #: When it is next looked who is late; inf: nothing is asked for.
        self._late_due = math.inf
        self._forget()

    def _forget(self) -> None:
        """Whatever is under way will not end."""
        self._turn += 1
        self._step: Step | None = None
        self._run: Run | None = None
        self._unseen: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._stage_free = [0.0] * self.stages

    # -- what the worker does about them ---------------------------------------------------------------------------

    @abstractmethod
    def _load(self, job: Job, first: int, blocks: int) -> None:
        """Blocks are to be copied into their pages; `Batcher.loaded` when they are there."""

    @abstractmethod
    def _planned(self) -> None:
        """The next step is planned: pages may have changed."""

    @abstractmethod
    def _late(self, job: Job) -> None:
        """It cannot be over by its deadline any more."""

    @abstractmethod
    def _lost(self, job: Job) -> None:
        """Its KV came from elsewhere, and is lost: too much to compute again here."""

    @abstractmethod
    def _resume(self, job: Job) -> None:
        """It was preempted: `Batcher.ready` again."""

    @abstractmethod
    def _computes(self, job: Job, until: int, seconds: float) -> None:
        """A step begins that computes its prompt up to token `until`, and spends so much of its time on that."""

    @abstractmethod
    def _outcome(self, job: Job, outcome: Outcome) -> None:
        """A step has ended; its token, if there is one, is counted."""

    # -- steps -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """There may be something to compute."""
        if self._step is None and self._run is None and self.alive and not self._planning:
            self._planning = True
            self._next_step()
            self._planning = False
            self._planned()

    def _next_step(self) -> None:
        now = self.loop.now
        for id in self.batcher.late(now):
            self._late(self.jobs[id])
        if self._fast_forward and self.stages == 1 and self._begin_run():
            return
        step = self.batcher.plan(now)
        for id in step.preempted:
            self._resume(self.jobs[id])
        for load in step.loads:
            self._load(self.jobs[load.id], load.first_block, load.blocks)
        within = self._within_recompute_limit(step)
        if within.slices:
            self._begin(within, now)
        elif step.preempted or step.slices:
            self.loop.at(now, self._wake)
        elif self.batcher.next_late < self._late_due:
            self._late_due = self.batcher.next_late
            self.loop.at(self._late_due, self._look_for_late, self._late_due)

    def _look_for_late(self, due: float) -> None:
        if due == self._late_due:
            self._late_due = math.inf
            self._wake()

    def _within_recompute_limit(self, step: Step) -> Step:
        """As workers do: a hand-off that lost little is mended here, one that lost all goes back for a new plan."""
        jobs = [self.jobs[planned.id] for planned in step.slices if not planned.decodes]
        most = RECOMPUTE_STEPS * self.batcher.max_tokens
        lost = [job for job in jobs if job.sequence.handed_off and _missing(job.sequence) > most]
        if not lost:
            return step
        for job in lost:
            self._lost(job)
        return dataclasses.replace(step, slices=[planned for planned in step.slices if planned.id in self.jobs])

    def _begin(self, step: Step, now: float) -> None:
        work = self.batcher.work(step)
        prefill = []
        jobs = []
        for planned in step.slices:
            job = self.jobs[planned.id]
            if planned.count > 1 or planned.start < job.work.prompt_tokens:
                prefill.append((planned.start, planned.count))
                jobs.append(job)
        seconds = self.time.seconds(prefill, work.decode_sequences, work.decode_context)
        self.batcher.observe(work, seconds)
        tokens = work.prefill_tokens + work.decode_sequences
        for (start, count), job in zip(prefill, jobs, strict=True):
            self._computes(job, start + count, seconds * count / tokens)
        self.steps += 1
        self._turn += 1
        self._step = step
        # In the order in which a run adds.
        end = now + (seconds + self.overhead)
        if self.stages > 1:
            end = self._pass_on(seconds / self.stages, now)
            if any(p.sample and not self.jobs[p.id].sequence.first_only for p in step.slices):
                # Its tokens are what the next step computes.
                end = self._stage_free[-1]
            end += self.overhead
        self.loop.step(end, self.number, self._turn, self._end_step)

    def _pass_on(self, seconds: float, now: float) -> float:
        """A chunk goes from stage to stage: each begins when it has it and is free. Returns when the first has done."""
        at = now
        for stage in range(self.stages):
            at = max(at, self._stage_free[stage]) + seconds
            self._stage_free[stage] = at
        return self._stage_free[0]

    def _end_step(self, turn: int) -> None:
        if turn != self._turn:
            return
        if self._run is not None:
            self._advance(len(self._run.ends))
            self._run = None
        else:
            self._finish_step()
        self._look()
        self._wake()

    def _between(self, call: Callable[..., None], *arguments: Any) -> None:
        """Something has come for this worker, which it sees at once, or when the step under way is over."""
        self.touch()
        if self._step is None:
            call(*arguments)
        else:
            self._unseen.append((call, arguments))

    def _look(self) -> None:
        """At all that has come during a step; nothing is begun before all of it is seen."""
        unseen, self._unseen = self._unseen, []
        self._planning = True
        for call, arguments in unseen:
            call(*arguments)
        self._planning = False

    def _finish_step(self) -> None:
        step, self._step = self._step, None
        assert step is not None, "a step was under way"
        tokens = []
        for planned in step.slices:
            job = self.jobs.get(planned.id)
            if not planned.sample:
                tokens.append(-1)
            else:
                tokens.append(token(job.work, job.sequence.generated) if job is not None else 0)
        outcomes = [(self.jobs[outcome.id], outcome) for outcome in self.batcher.finish(step, tokens)]
        if self.stages > 1:
            self.loop.at(self._stage_free[-1], self._leave, outcomes)
        else:
            self._leave(outcomes)

    def _leave(self, outcomes: list[tuple[Job, Outcome]]) -> None:
        """A step has left the last stage."""
        end = len(self.ends)
        self.ends.append(self.loop.now)
        for job, outcome in outcomes:
            if self.jobs.get(outcome.id) is not job:
                continue
            if outcome.token is not None:
                _got(job, end, end + 1)
            self._outcome(job, outcome)

    # -- fast-forward ----------------------------------------------------------------------------------------------

    def _begin_run(self) -> bool:
        """Computes as many equal steps at once as there are, if there are several."""
        batcher = self.batcher
        count = min(batcher.run_length(), LONGEST_RUN)
        if count < 2:
            return False
        jobs = [self.jobs[sequence.id] for sequence in batcher.runs]
        if not all(job.tokens for job in jobs):
            return False  # somebody's gateway waits for the end of the first of them
        # The step that ends an answer is not like those before it.
        count = min(count, min(job.left for job in jobs) - 1)
        if count < 2:
            return False
        context = batcher.running_context + len(jobs)
        base, per_sequence, per_token = self.time.decode_coefficients
        contexts = np.arange(context, context + count * len(jobs), len(jobs), dtype=np.float64)
        times = np.empty(count + 1)
        times[0] = now = self.loop.now
        times[1:] = ((base + per_sequence * len(jobs)) + per_token * contexts) + self.overhead
        times = np.add.accumulate(times)
        if times[-2] >= batcher.next_late:
            # A step that begins then is not planned before somebody has been dropped.
            times = times[: int(np.searchsorted(times[:-1], batcher.next_late)) + 1]
            if len(times) < 3:
                return False
        self._run = Run(now, times[1:], jobs)
        self._turn += 1
        self.loop.step(float(self._run.ends[-1]), self.number, self._turn, self._end_step)
        return True

    def _advance(self, count: int) -> None:
        """The first `count` steps of the run are over."""
        run = self._run
        assert run is not None, "there is a run"
        first = len(self.ends)
        self.ends.extend(run.ends[:count])
        self.steps += count
        self.batcher.run(count)
        for job in run.jobs:
            _got(job, first, first + count)

    def _over(self) -> int:
        """Steps of the run that are over by now."""
        run = self._run
        return 0 if run is None else int(np.searchsorted(run.ends, self.loop.now, side="right"))

    def touch(self) -> None:
        """To be called before anything happens to this worker: ends a run with the step under way."""
        run = self._run
        if run is None:
            return
        done = self._over()
        if done:
            self._advance(done)
        began = float(run.ends[done - 1]) if done else run.began
        self._run = None
        self._step = self.batcher.plan(began)
        assert not self._step.loads and len(self._step.slices) == len(run.jobs), "the steps were not equal"
        self.steps += 1
        self._turn += 1
        self.loop.step(float(run.ends[done]), self.number, self._turn, self._end_step)

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Steps begun, those of a run that are over included."""
        return self.steps + self._over()

    def running_context(self) -> int:
        """Tokens in the pages of what runs, as of the last step."""
        return self.batcher.running_context + self._over() * (len(self._run.jobs) if self._run else 0)

    def queue_seconds(self) -> float:
        """Until all prompts accepted so far are computed, as the worker predicts."""
        if self._run is not None and self.batcher.queued_tokens:
            self.touch()
        return self.batcher.queue_seconds

    def gap(self) -> float:
        """Seconds of a step with all that decodes here, by the cost model; 0 without."""
        sequences = sum(job.sequence.generated > job.work.generated for job in self.jobs.values())
        return self.time.seconds((), sequences, self.running_context() + sequences)


def _missing(sequence: Sequence) -> int:
    """Tokens whose KV has existed before, and is to be computed again."""
    return sequence.high_water - sequence.computed


def _got(job: Job, first: int, last: int) -> None:
    """It has got a token at each of these ends of steps."""
    if job.tokens and job.tokens[-1][1] == first:
        job.tokens[-1][1] = last
    else:
        job.tokens.append([first, last])
