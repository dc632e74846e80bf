"""Gates: pass, fail or inconclusive, from two runs on the same items. Pure.

    pass          the one-sided exact McNemar test finds the candidate better, p < alpha
    fail          the candidate is not better: it gains no more items than it loses
    inconclusive  it gains more than it loses, but chance alone may do that

What cannot be compared soundly is refused with Conflict rather than decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from evals import statistics
from evals.outcomes import ItemResult, Outcome, counts
from registry.errors import Conflict, InvalidInput
from registry.views import EvalRunView

DEFAULT_ALPHA = 0.05

Verdict = Literal["pass", "fail", "inconclusive"]

# What may differ between two servers of one kind.
_IDENTITY = frozenset({"replica_id", "self_tests"})


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A verdict with what it rests on."""

    verdict: Verdict
    reason: str
    statistics: dict[str, Any]


def check_alpha(alpha: float) -> None:
    """Raises InvalidInput unless 0 < alpha < 0.5."""
    if not 0 < alpha < 0.5:
        raise InvalidInput(f"alpha is {alpha}; it must lie between 0 and 0.5")


def check_comparable(candidate: EvalRunView, baseline: EvalRunView) -> None:
    """Raises Conflict, naming what differs, unless both runs asked the same in the same way."""
    if candidate.suite_digest != baseline.suite_digest:
        raise Conflict(
            f"{candidate.reference} and {baseline.reference} were run on different suites "
            f"({candidate.suite_digest} and {baseline.suite_digest})"
        )
    ours, theirs = _settings(candidate), _settings(baseline)
    differing = [
        f"{name} ({ours.get(name)} and {theirs.get(name)})"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if candidate.engine_fingerprint != baseline.engine_fingerprint or differing:
        what = ", ".join(differing) or "fingerprint"
        raise Conflict(
            f"the runs of {candidate.reference} and {baseline.reference} differ in {what}: run "
            f"both again on one engine, with: slipway eval run {baseline.reference} --suite "
            f"{candidate.suite_name}"
        )


def _settings(run: EvalRunView) -> dict[str, Any]:
    return {name: value for name, value in run.engine.items() if name not in _IDENTITY}


def pair(candidate: Sequence[ItemResult], baseline: Sequence[ItemResult]) -> statistics.Pairs:
    """Join two runs item by item. Raises Conflict when an item has no partner.

    An item on which the baseline's server failed and the candidate's did not says nothing of
    either model and would count for the candidate: it is refused too. The other way round it
    counts against the candidate.
    """
    theirs = {result.id: result for result in baseline}
    ids = [result.id for result in candidate]
    if len(theirs) != len(baseline) or len(set(ids)) != len(ids):
        raise Conflict("a run holds an item twice; run the evaluation again")
    unpaired = sorted(theirs.keys() ^ set(ids))
    if unpaired or not ids:
        raise Conflict(
            f"the runs hold different items: {', '.join(unpaired[:10]) or 'none at all'}; "
            "run the evaluations again"
        )
    unfair = [
        result.id
        for result in candidate
        if theirs[result.id].outcome is Outcome.ERROR and result.outcome is not Outcome.ERROR
    ]
    if unfair:
        raise Conflict(
            f"the baseline's server failed on {len(unfair)} items ({', '.join(unfair[:10])}) "
            "that the candidate's answered; run the baseline again"
        )
    rights = [(result.correct, theirs[result.id].correct) for result in candidate]
    return statistics.Pairs(
        both=rights.count((True, True)),
        gained=rights.count((True, False)),
        lost=rights.count((False, True)),
        neither=rights.count((False, False)),
    )


def decide(
    candidate: Sequence[ItemResult],
    baseline: Sequence[ItemResult],
    *,
    alpha: float = DEFAULT_ALPHA,
    looks: int = 1,
) -> Decision:
    """Whether the candidate is better than the baseline.

    `alpha`: how often a candidate no better than the baseline may pass, for one look;
    `looks`: how many gates of this line of versions on these items there are with this one.
    Raises InvalidInput for alpha, Conflict for runs that do not pair.
    """
    check_alpha(alpha)
    pairs = pair(candidate, baseline)
    table = _table(pairs, alpha)
    table |= {
        "candidate_counts": counts(candidate),
        "baseline_counts": counts(baseline),
        "looks": looks,
    }
    decided = verdict(pairs, alpha=alpha)
    reason = _reason(decided, pairs, table)
    if looks > 1:
        reason += f"; look {looks} at these items"
    return Decision(verdict=decided, reason=reason, statistics=table)


def verdict(pairs: statistics.Pairs, *, alpha: float) -> Verdict:
    """The rule itself: what a table of counts decides."""
    if pairs.gained <= pairs.lost:
        return "fail"
    better = statistics.mcnemar_exact(pairs.gained, pairs.lost) < alpha
    return "pass" if better else "inconclusive"


def _reason(decided: Verdict, pairs: statistics.Pairs, table: dict[str, Any]) -> str:
    told = (
        f"gained {pairs.gained} and lost {pairs.lost} of {pairs.n} items "
        f"({100 * table['difference']:+.1f} points, p = {table['p']:.2g})"
    )
    if decided == "fail":
        return f"the candidate is not better: {told}"
    if decided == "pass":
        return f"the candidate is better: {told}"
    if table["detectable"] is None:
        power = "the two differ on too few items to show any difference"
    else:
        least = 100 * table["detectable"]
        power = f"the least gain that {pairs.n} items show with chance 0.8 is {least:.1f} points"
    return f"chance alone may do this: {told}, p is not below {table['alpha']:g}; {power}"


def _table(pairs: statistics.Pairs, alpha: float) -> dict[str, Any]:
    right, base_right = pairs.both + pairs.gained, pairs.both + pairs.lost
    detectable = statistics.minimum_detectable_effect(
        pairs.n, discordant_share=pairs.discordant / pairs.n, alpha=alpha
    )
    return {
        "n": pairs.n,
        "candidate_correct": right,
        "baseline_correct": base_right,
        "candidate_accuracy": right / pairs.n,
        "baseline_accuracy": base_right / pairs.n,
        "candidate_interval": _bounds(statistics.wilson(right, pairs.n)),
        "baseline_interval": _bounds(statistics.wilson(base_right, pairs.n)),
        "both": pairs.both,
        "gained": pairs.gained,
        "lost": pairs.lost,
        "neither": pairs.neither,
        "difference": (pairs.gained - pairs.lost) / pairs.n,
        "difference_interval": _bounds(statistics.paired_difference(pairs)),
        "p": statistics.mcnemar_exact(pairs.gained, pairs.lost),
        "p_two_sided": statistics.mcnemar_exact(pairs.gained, pairs.lost, alternative="two-sided"),
        "alpha": alpha,
        "detectable": detectable,
        "methods": {
            "test": "exact McNemar, one-sided",
            "intervals": "Wilson, 95 %",
            "difference_interval": "Newcombe hybrid score (method 10), 95 %",
            "detectable": "exact power 0.8",
        },
    }


def _bounds(interval: statistics.Interval) -> list[float]:
    return list(asdict(interval).values())
