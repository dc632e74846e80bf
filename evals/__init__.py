"""Held-out evidence: suites, graders, runs, paired statistics and the gates that decide."""

from evals.api import router
from evals.gates import DEFAULT_ALPHA, Decision, decide
from evals.outcomes import ItemResult, Outcome
from evals.service import EvalService
from evals.statistics import Interval, Pairs, mcnemar_exact, paired_difference, wilson
from evals.suites import Suite, load, parse, problems
from evals.targets import Completion, CompletionsTarget, Served, Target, TargetProvider

__all__ = [
    "DEFAULT_ALPHA",
    "Completion",
    "CompletionsTarget",
    "Decision",
    "EvalService",
    "Interval",
    "ItemResult",
    "Outcome",
    "Pairs",
    "Served",
    "Suite",
    "Target",
    "TargetProvider",
    "decide",
    "load",
    "mcnemar_exact",
    "paired_difference",
    "parse",
    "problems",
    "router",
    "wilson",
]
