"""Everybody is admitted, and waits."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Case, Refusal


@dataclass(frozen=True, slots=True)
class Everybody:
    def __call__(self, case: Case) -> Refusal | None:
        return None
