"""Who takes part in the goodput bench, and what may be set of each: all get the same number of settings to try.

Settings are drawn by a seeded generator, evenly from what is listed, the first is the contender as it comes. Rivals
take part twice:

field   as the field runs them: a router before workers that compute prompts as they came, each token shown as it
        comes, nobody refused (but by Algorithm 1, which has early rejection in it)
lent    with all of ours but the policy: our workers' order of prompts, pacing of first tokens, and early rejection

Whether to fetch a prefix from another node at all (`fetch`) is open to each in both. Admission that looks ahead or
waits, and roles, are ours; an ablation shows the best rival with them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

Knobs = dict[str, tuple[str, ...]]

#: For all rivals.
ADMISSIONS = ("none", "at-arrival")
FETCH = ("false", "true")


@dataclass(frozen=True)
class Setting:
    """What a run is made with."""

    policy: str
    admission: str
    roles: bool = False
    pacing: bool = True
    discipline: str = "ours"

    def __str__(self) -> str:
        parts = [self.policy, *([] if self.admission == "none" else [self.admission])]
        plain = "" if self.discipline == "ours" else f" {self.discipline}"
        return "+".join([*parts, *(["roles"] if self.roles else [])]) + plain + ("" if self.pacing else " unpaced")


@dataclass(frozen=True)
class Contender:
    """knobs: values of each setting of the policy, the one that it comes with first. league: see the module."""

    name: str
    policy: str
    knobs: Knobs
    admissions: tuple[str, ...] = ADMISSIONS
    roles: tuple[bool, ...] = (False,)
    league: str = "lent"

    def settings(self, count: int, seed: int) -> list[Setting]:
        """So many different ones, as it comes and then by lot; fewer if there are no more."""
        draw = random.Random(f"{seed} {self.name}")
        first = {knob: values[0] for knob, values in self.knobs.items()}
        found = [self._setting(first, self.admissions[0], self.roles[0])]
        for _ in range(100 * count):
            if len(found) == count:
                break
            drawn = {knob: draw.choice(values) for knob, values in self.knobs.items()}
            setting = self._setting(drawn, draw.choice(self.admissions), draw.choice(self.roles))
            if setting not in found:
                found.append(setting)
        return found

    def _setting(self, values: dict[str, str], admission: str, roles: bool) -> Setting:
        told = ",".join(f"{knob}={value}" for knob, value in values.items())
        policy = f"{self.policy}:{told}" if told else self.policy
        field = self.league == "field"
        return Setting(policy, admission, roles, not field, "first-come" if field else "ours")


LENT = (
    Contender(
        "kvcache-centric",
        "kvcache-centric",
        {"threshold": ("1", "1.5", "2", "4"), "replicates": ("true", "false")},
    ),
    Contender(
        "dynamo",
        "dynamo",
        {
            "fetch": FETCH,
            "prefill_scale": ("1", "0.5", "2", "4"),
            "host": ("0.75", "0.5", "1"),
            "temperature": ("0", "0.1", "0.5"),
        },
    ),
    Contender("lmetric", "lmetric", {"fetch": FETCH, "waiting": ("1", "0", "0.5", "2")}),
    Contender(
        "llm-d", "llm-d", {"fetch": FETCH, "prefix": ("2", "1", "3"), "queue": ("1", "2", "4"), "kv": ("1", "2", "0")}
    ),
    Contender(
        "sglang",
        "sglang",
        {
            "fetch": FETCH,
            "ratio": ("0.3", "0.5", "0.7"),
            "imbalance": ("64", "16", "4"),
            "ratio_imbalance": ("1.5", "1.1"),
        },
    ),
)
FIELD = tuple(
    replace(
        rival,
        name=f"{rival.name} (field)",
        league="field",
        admissions=("at-arrival",) if rival.policy == "kvcache-centric" else ("none",),
    )
    for rival in LENT
)
OURS = Contender(
    "ours",
    "least-harm",
    {"gather": ("false",), "even": ("false", "true")},
    ("patient", "patient:margin=1.05", "at-arrival", "predictive"),
    (True,),
)
LEAGUES = {"field": FIELD, "lent": LENT}
CONTENDERS = (*FIELD, *LENT, OURS)
