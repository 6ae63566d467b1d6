"""Admissions by name. To add one: a file here and a line in ADMISSIONS."""

from __future__ import annotations

from .base import Admission, Case, Refusal

#: In the notation of entry points: a file is read when its admission is asked for. The models of others live beside the
#: simulator, a floor above.
ADMISSIONS: dict[str, str] = {
    "none": "pyengine.scheduler.policies.admission.none:Everybody",
    "at-arrival": "pyengine.scheduler.policies.admission.at_arrival:AtArrival",
    "patient": "pyengine.scheduler.policies.admission.patient:Patient",
    "predictive-system": "pyengine.scheduler.policies.admission.predictive_system:PredictiveSystem",
    "predictive": "pyengine.scheduler.policies.admission.predictive:Predictive",
    "baseline": "pyengine.scheduler.sim.policies.baseline:Baseline",
}

__all__ = ["ADMISSIONS", "Admission", "Case", "Refusal"]
