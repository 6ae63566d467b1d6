"""Asks a policy, and trusts nothing it answers: a plugin's fault costs one request, never the conductor."""

from __future__ import annotations

import random

import numpy as np

from ..cluster import View
from .base import Ask, Choice, Policy


class PolicyFailed(Exception):
    """The policy raised, or answered with a choice that no plan can be made of; the text names it and says what."""


def decide(name: str, policy: Policy, view: View, ask: Ask, rng: random.Random) -> Choice:
    """The policy's choice, if it is one of the rows it was given. name: for the text. Raises PolicyFailed."""
    try:
        # Whatever a plugin raises is its own fault, and must end nobody else.
        choice = policy(view, ask, rng)
        fault = _fault(view, choice)
    except Exception as error:
        raise PolicyFailed(f"the policy {name!r} failed: {type(error).__name__}: {error}") from error
    if fault:
        raise PolicyFailed(f"the policy {name!r} {fault}")
    return choice


def _fault(view: View, choice: Choice) -> str:
    if not isinstance(choice, Choice):
        return f"answered {choice!r} instead of a Choice"
    if not isinstance(choice.fetch, bool | np.bool_):
        return f"answered fetch={choice.fetch!r}, which is neither true nor false"
    prefill, decode, count = choice.prefill, choice.decode, len(view.workers)
    if not (0 <= prefill < count and 0 <= decode < count):
        return f"chose row {prefill} or {decode} of {count}"
    if prefill == decode:
        if not ((view.both[prefill] and view.prefills[prefill]) or view.inlines[prefill]):
            return f"gave {view.workers[prefill].worker!r} both parts, which it may not take"
    elif not view.prefills[prefill] or not view.decodes[decode] or view.both[prefill]:
        return f"chose {view.workers[prefill].worker!r} and {view.workers[decode].worker!r}, which are no pair"
    return ""
