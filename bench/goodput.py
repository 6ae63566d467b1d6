"""Goodput of our policy, admission and roles against the rivals': tuned on the first half of a trace, judged on the
second.

Goodput: requests per second within all objectives. Rivals take part as the field runs them, and again with all of ours
but the policy (`goodput_contenders.py`); each league has its own best rival. Parts, all unless some are named with
--parts:

tune      every contender gets as many settings, drawn by one seed, on a slice of each trace's first half
judge     the best setting of each, on a slice of the second half: loads x splits of roles with jittered arrivals, and
          arrivals as the trace has them at the first split and the highest load
repeat    at the load where the best rival's goodput peaks, under more seeds: is the difference real
ablation  ours without one part, rivals with our parts, and all with the first token shown as it comes

Prints one JSON object a line (bench, case, value, unit, against, ratio); the tables go to stderr. With --cache, runs
are remembered by all that they depend on, the scheduler's sources included: a bench that was stopped goes on where it
was.

--quick: generated sessions, two settings, one load: to see that it works.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.common import line, note
from bench.goodput_contenders import LEAGUES, OURS, Setting
from bench.goodput_runs import GENERATED, Cache, Case, Result
from pyengine.scheduler.report.statistics import compare
from pyengine.scheduler.report.table import table

PARTS = ("tune", "judge", "repeat", "ablation")
#: Prefill and decode workers; the first is the one that is tuned for.
SPLITS = ((8, 8), (6, 10), (10, 6))
#: Of the settings that are drawn. Jitter while tuning has seed 1, while judging 2 and more.
DRAWN = 7
OUR = OURS.name

Split = tuple[int, int]


class Slice(NamedTuple):
    """Requests of a half: so many from `first` on."""

    first: int
    size: int


@dataclass(frozen=True)
class Study:
    """How much of a trace is run. loads: times its own speed; tuned_at: one of them."""

    trace: str
    loads: tuple[float, ...]
    tuned_at: float
    tuned: Slice
    judged: Slice

    @property
    def name(self) -> str:
        return Path(self.trace).stem.removesuffix("_trace")

    def case(self, setting: Setting, load: float, split: Split, seed: int, *, raw: bool = False, half: int = 1) -> Case:
        first, count = self.judged if half else self.tuned
        return Case(
            self.trace, half, first, count, seed, raw, load, split,
            setting.policy, setting.admission, setting.roles, setting.pacing, setting.discipline,
        )  # fmt: skip


#: Speeds from where a router of the field keeps its objectives to well beyond where the quickest does.
STUDIES = {
    "conversation_trace": ((0.8, 1.0, 1.2, 1.4, 1.7), 1.2, Slice(500, 1_000), Slice(0, 1_000)),
    "synthetic_trace": ((1.0, 1.4, 1.8, 2.4), 1.6, Slice(0, 1_000), Slice(0, 1_000)),
}
OTHER = (1.0, 1.5, 2.0), 1.5, Slice(0, 1_000), Slice(0, 1_000)
QUICK = ((1.5,), 1.5, Slice(0, 150), Slice(0, 150))


def studies(traces: Iterable[str], quick: bool) -> list[Study]:
    return [Study(trace, *(QUICK if quick else STUDIES.get(Path(trace).stem, OTHER))) for trace in traces]


class Bench:
    """Ours among the rivals of one league. chosen: setting by study and contender, once tuned."""

    def __init__(self, league: str, cache: Cache, jobs: int, settings: int, seeds: int) -> None:
        self.league, self.rivals = league, LEAGUES[league]
        self.contenders = (*self.rivals, OURS)
        self.cache, self.jobs, self.settings, self.seeds = cache, jobs, settings, seeds
        self.chosen: dict[tuple[str, str], Setting] = {}

    def tune(self, study: Study, show: bool) -> None:
        tried = {
            (contender.name, setting): study.case(setting, study.tuned_at, SPLITS[0], 1, half=0)
            for contender in self.contenders
            for setting in contender.settings(self.settings, DRAWN)
        }
        results = self.cache.run(tried.values(), self.jobs)
        for contender in self.contenders:
            mine = [
                (results[case].goodput, setting) for (name, setting), case in tried.items() if name == contender.name
            ]
            # Of equals the one that was drawn first.
            best, setting = max(mine, key=lambda pair: pair[0])
            self.chosen[study.name, contender.name] = setting
            if show:
                line(
                    "goodput", f"{study.name} tuned {contender.name}", best, "requests/s",
                    against="as it comes", ratio=best / mine[0][0], setting=str(setting), tried=len(mine),
                )  # fmt: skip

    def judge(self, study: Study, splits: tuple[Split, ...]) -> None:
        names = [contender.name for contender in self.contenders]
        cells = [(False, *cell) for cell in itertools.product(splits, study.loads)]
        cells.append((True, splits[0], study.loads[-1]))
        cases = {
            (name, cell): study.case(self.chosen[study.name, name], cell[2], cell[1], 2, raw=cell[0])
            for cell in cells
            for name in names
        }
        results = self.cache.run(cases.values(), self.jobs)
        found = {key: results[case] for key, case in cases.items()}
        rows, ratios = [], []
        for raw, split, load in cells:
            good = {name: found[name, (raw, split, load)].goodput for name in names}
            rival = max((name for name in names if name != OUR), key=lambda name: good[name])
            ratios.append(good[OUR] / good[rival])
            arrivals = "raw" if raw else "jittered"
            shares = [found[name, (raw, split, load)].effective * 100 for name in names]
            rows.append(
                (arrivals, _say(split), f"{load:g}", *(f"{share:.1f}" for share in shares), f"{ratios[-1]:.3f}")
            )
            line(
                "goodput", f"{study.name} {arrivals} {_say(split)} x{load:g}", good[OUR], "requests/s",
                against=rival, ratio=ratios[-1], effective=found[OUR, (raw, split, load)].effective,
            )  # fmt: skip
        note(f"\n{study.name}, {self.league}: % of requests within objectives; ours / best rival\n")
        note(table(("arrivals", "split", "load", *names, "ratio"), rows, left=3))
        line(
            "goodput",
            f"{study.name} sweep, {self.league}",
            float(np.mean(ratios)) * 100 - 100,
            "% over the best rival",
            cells=len(ratios),
        )
        self._peaks(study, found, splits, names)

    def _peaks(
        self,
        study: Study,
        found: dict[tuple[str, tuple[bool, Split, float]], Result],
        splits: tuple[Split, ...],
        names: list[str],
    ) -> None:
        """At the load where the best rival's goodput peaks, and peak against peak; by split, and over all splits."""
        for chosen in dict.fromkeys([*((split,) for split in splits), splits]):
            points = list(itertools.product(chosen, study.loads))
            best = {name: max(points, key=lambda point: found[name, (False, *point)].goodput) for name in names}
            peak = {name: found[name, (False, *best[name])] for name in names}
            rival = max((name for name in names if name != OUR), key=lambda name: peak[name].goodput)
            there = found[OUR, (False, *best[rival])]
            where = _say(chosen[0]) if len(chosen) == 1 else "any split"
            line(
                "goodput", f"{study.name} {where} at the peak of {rival}", there.goodput, "requests/s",
                against=f"{rival} {_say(best[rival][0])} x{best[rival][1]:g}",
                ratio=there.goodput / peak[rival].goodput,
                rival_effective=peak[rival].effective, possible=1 / peak[rival].effective,
            )  # fmt: skip
            line(
                "goodput", f"{study.name} {where} peak against peak", peak[OUR].goodput, "requests/s",
                against=f"{rival} {_say(best[rival][0])} x{best[rival][1]:g}",
                ratio=peak[OUR].goodput / peak[rival].goodput, ours_at=f"{_say(best[OUR][0])} x{best[OUR][1]:g}",
            )  # fmt: skip

    def repeat(self, study: Study) -> None:
        """Jittered, at the first split: all under the same seeds, pair by pair."""
        judged = {
            (contender.name, load): study.case(self.chosen[study.name, contender.name], load, SPLITS[0], 2)
            for contender in self.rivals
            for load in study.loads
        }
        results = self.cache.run(judged.values(), self.jobs)
        rival, load = max(judged, key=lambda key: results[judged[key]].goodput)
        pairs = [
            [study.case(self.chosen[study.name, name], load, SPLITS[0], seed) for seed in range(2, 2 + self.seeds)]
            for name in (OUR, rival)
        ]
        results = self.cache.run(itertools.chain(*pairs), self.jobs)
        ours, theirs = (np.array([results[case].goodput for case in row]) for row in pairs)
        difference = compare((ours - theirs)[None, :])[0]
        line(
            "goodput", f"{study.name} {_say(SPLITS[0])} x{load:g} over {self.seeds} seeds", float(ours.mean()),
            "requests/s", against=rival, ratio=float(ours.mean() / theirs.mean()), p=difference.p, real=difference.real,
        )  # fmt: skip

    def ablation(self, study: Study, splits: tuple[Split, ...]) -> None:
        """At the highest load, jittered."""
        load = study.loads[-1]
        ours = self.chosen[study.name, OUR]
        rival = self._best_rival(study)
        theirs = self.chosen[study.name, rival]
        variants = {
            "ours": ours,
            "admission: none": replace(ours, admission="none"),
            "admission: at-arrival": replace(ours, admission="at-arrival"),
            "admission: predictive": replace(ours, admission="predictive"),
            "admission: patient": replace(ours, admission="patient"),
            "roles turned over": replace(ours, roles=not ours.roles),
            rival: theirs,
            f"{rival} with our admission": replace(theirs, admission=ours.admission),
            f"{rival} with all but our policy": replace(ours, policy=theirs.policy),
            "ours unpaced": replace(ours, pacing=False),
            "ours, prompts as they came": replace(ours, discipline="first-come"),
            f"{rival} unpaced": replace(theirs, pacing=False),
            f"{rival} paced": replace(theirs, pacing=True),
            f"{rival} with our order of prompts": replace(theirs, discipline="ours"),
        }
        cases = {
            (name, split): study.case(setting, load, split, 2) for name, setting in variants.items() for split in splits
        }
        results = self.cache.run(cases.values(), self.jobs)
        rows = []
        for name, setting in variants.items():
            shares = [results[cases[name, split]] for split in splits]
            rows.append((name, str(setting), *(f"{share.effective * 100:.1f}" for share in shares)))
            base = [results[cases["ours", split]].goodput for split in splits]
            ratio = float(np.mean([share.goodput / own for share, own in zip(shares, base, strict=True)]))
            line(
                "goodput", f"{study.name} x{load:g} {self.league} ablation: {name}",
                float(np.mean([s.goodput for s in shares])), "requests/s",
                against="ours", ratio=ratio, setting=str(setting),
            )  # fmt: skip
        note(f"\n{study.name} at x{load:g}, jittered: % of requests within objectives\n")
        note(table(("variant", "setting", *map(_say, splits)), rows, left=2))

    def _best_rival(self, study: Study) -> str:
        cases = {
            r.name: study.case(self.chosen[study.name, r.name], study.loads[-1], SPLITS[0], 2) for r in self.rivals
        }
        results = self.cache.run(cases.values(), self.jobs)
        return max(cases, key=lambda name: results[cases[name]].goodput)


def _say(split: Split) -> str:
    return f"{split[0]}P{split[1]}D"


def _split(text: str) -> Split:
    prefill, _, decode = text.removesuffix("D").partition("P")
    return int(prefill), int(decode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=[GENERATED], help="files; default: generated sessions")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--leagues", nargs="+", choices=LEAGUES, default=list(LEAGUES))
    parser.add_argument("--splits", nargs="+", type=_split, default=SPLITS, help="prefill and decode workers: 8P8D ...")
    parser.add_argument("--settings", type=int, default=4, help="that each contender may try, as it comes included")
    parser.add_argument("--seeds", type=int, default=6, help="of jitter, where a difference is tested")
    parser.add_argument("--cache", type=Path, help="file of results that grows")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if min(arguments.settings, arguments.seeds, arguments.jobs) < 1:
        parser.error("--settings, --seeds and --jobs must be at least 1")
    settings, seeds = (2, 2) if arguments.quick else (arguments.settings, arguments.seeds)
    cache = Cache(arguments.cache)
    splits = SPLITS[:1] if arguments.quick else tuple(arguments.splits)
    for study, league in itertools.product(studies(arguments.traces, arguments.quick), arguments.leagues):
        bench = Bench(league, cache, arguments.jobs, settings, seeds)
        bench.tune(study, "tune" in arguments.parts)
        if "judge" in arguments.parts:
            bench.judge(study, splits)
        if "repeat" in arguments.parts:
            bench.repeat(study)
        if "ablation" in arguments.parts:
            bench.ablation(study, SPLITS[:1])


if __name__ == "__main__":
    main()
