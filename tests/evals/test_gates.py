from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from evals import gates
from evals.outcomes import ItemResult, Outcome
from evals.statistics import Pairs, mcnemar_exact, minimum_detectable_effect
from registry.errors import Conflict, InvalidInput
from registry.views import EvalRunView


def results(outcomes) -> list[ItemResult]:
    return [
        ItemResult(id=f"i{n}", question="q", answer="1", outcome=outcome)
        for n, outcome in enumerate(outcomes)
    ]


def arms(*, both=0, gained=0, lost=0, neither=0):
    right, wrong = Outcome.CORRECT, Outcome.WRONG
    ours = [right] * (both + gained) + [wrong] * (lost + neither)
    theirs = [right] * both + [wrong] * gained + [right] * lost + [wrong] * neither
    return results(ours), results(theirs)


def test_a_better_candidate_passes():
    found = gates.decide(*arms(both=20, gained=45, lost=3, neither=172))
    assert found.verdict == "pass"
    assert found.reason.startswith("the candidate is better: gained 45 and lost 3 of 240 items")
    table = found.statistics
    assert (table["n"], table["both"], table["gained"], table["lost"], table["neither"]) == (
        240,
        20,
        45,
        3,
        172,
    )
    assert (table["candidate_correct"], table["baseline_correct"]) == (65, 23)
    assert table["difference"] == pytest.approx(0.175)
    assert table["p"] == mcnemar_exact(45, 3)
    low, high = table["difference_interval"]
    assert 0.1 < low < 0.175 < high < 0.25
    assert 0 < table["detectable"] < 0.175
    assert table["looks"] == 1
    assert table["candidate_counts"]["correct"] == 65


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (5, 5), (3, 45), (0, 9)])
def test_a_candidate_that_is_not_better_fails(gained, lost):
    found = gates.decide(*arms(both=100, gained=gained, lost=lost, neither=20))
    assert found.verdict == "fail"
    assert "not better" in found.reason


@pytest.mark.parametrize(("gained", "lost"), [(1, 0), (4, 0), (10, 5), (55, 45)])
def test_a_lucky_looking_candidate_is_inconclusive(gained, lost):
    found = gates.decide(*arms(both=100, gained=gained, lost=lost, neither=20))
    assert found.verdict == "inconclusive"
    assert "chance alone" in found.reason


def test_inconclusive_says_what_would_have_been_seen():
    small = gates.decide(*arms(both=50, gained=2, lost=0, neither=48))
    assert "too few items to show any difference" in small.reason
    larger = gates.decide(*arms(both=100, gained=30, lost=25, neither=85))
    assert f"{100 * larger.statistics['detectable']:.1f} points" in larger.reason


def test_alpha_is_the_border():
    better = arms(both=10, gained=5, lost=0, neither=10)  # p = 1/32
    assert gates.decide(*better, alpha=0.05).verdict == "pass"
    assert gates.decide(*better, alpha=1 / 32).verdict == "inconclusive"
    assert gates.decide(*better, alpha=0.01).verdict == "inconclusive"


@pytest.mark.parametrize("alpha", [0, -0.1, 0.5, 1, float("nan")])
def test_alpha_out_of_bounds_is_refused(alpha):
    with pytest.raises(InvalidInput, match=r"between 0 and 0\.5"):
        gates.decide(*arms(both=1), alpha=alpha)


def test_later_looks_are_told():
    found = gates.decide(*arms(both=10, gained=9, neither=10), looks=3)
    assert found.reason.endswith("; look 3 at these items")
    assert found.statistics["looks"] == 3


def test_only_correct_counts():
    found = gates.pair(results(Outcome), results([Outcome.WRONG] * 5))
    assert found == Pairs(both=0, gained=1, lost=0, neither=4)


def test_the_order_of_items_does_not_matter():
    ours, theirs = arms(both=3, gained=9, lost=1, neither=4)
    assert gates.decide(ours, theirs[::-1]) == gates.decide(ours, theirs)


def test_missing_pairs_are_refused_by_name():
    ours, theirs = arms(both=5)
    with pytest.raises(Conflict, match="different items: i4"):
        gates.decide(ours, theirs[:-1])
    with pytest.raises(Conflict, match="different items: i0"):
        gates.decide(ours[1:], theirs)
    with pytest.raises(Conflict, match="none at all"):
        gates.decide([], [])
    with pytest.raises(Conflict, match="twice"):
        gates.decide(ours + ours[:1], theirs)
    with pytest.raises(Conflict, match="twice"):
        gates.decide(ours, theirs + theirs[:1])


def test_a_broken_baseline_server_is_no_gain():
    right, error = Outcome.CORRECT, Outcome.ERROR
    with pytest.raises(Conflict, match=r"failed on 2 items \(i0, i1\)"):
        gates.decide(results([right] * 5), results([error, error, right, right, right]))
    both = gates.pair(results([error, right]), results([error, right]))
    assert both == Pairs(both=1, gained=0, lost=0, neither=1)
    against = gates.pair(results([error, right]), results([right, right]))
    assert against.lost == 1


def run_view(reference="g/1", suite="sha256:a", fingerprint="f", **engine) -> EvalRunView:
    return EvalRunView(
        id="r",
        tenant_id="t",
        version_id="v",
        version_digest="d",
        reference=reference,
        suite_name="sums",
        suite_digest=suite,
        engine={"name": "vllm", "dtype": "float32", "grader": "numeric/1"} | engine,
        engine_fingerprint=fingerprint,
        counts={},
        items=1,
        correct=1,
        evidence_digest="e",
        created_at=datetime.now(UTC),
    )


def test_runs_on_two_replicas_of_one_engine_are_comparable():
    ours = run_view("g/2", replica_id="a", self_tests={"loaded": {"to_base": 1}})
    gates.check_comparable(ours, run_view(replica_id="b", self_tests={"loaded": {}}))


@pytest.mark.parametrize(
    ("other", "telling"),
    [
        (run_view(suite="sha256:b"), "different suites"),
        (run_view(dtype="bfloat16"), r"differ in dtype \(float32 and bfloat16\)"),
        (run_view(grader="numeric/2"), r"grader \(numeric/1 and numeric/2\)"),
        (run_view(threads=4), r"threads \(None and 4\)"),
        (run_view(fingerprint="g"), "differ in fingerprint"),
    ],
)
def test_what_differs_is_named(other, telling):
    with pytest.raises(Conflict, match=telling):
        gates.check_comparable(run_view("g/2"), other)


@given(
    both=st.integers(0, 60),
    gained=st.integers(0, 60),
    lost=st.integers(0, 60),
    neither=st.integers(1, 60),
    alpha=st.floats(0.001, 0.49),
)
@settings(deadline=None, max_examples=60)
def test_decide_obeys_its_rule(both, gained, lost, neither, alpha):
    ours, theirs = arms(both=both, gained=gained, lost=lost, neither=neither)
    found = gates.decide(ours, theirs, alpha=alpha).verdict
    assert found == gates.verdict(
        Pairs(both=both, gained=gained, lost=lost, neither=neither), alpha=alpha
    )
    # Both ways round can never pass.
    if found == "pass":
        assert gates.decide(theirs, ours, alpha=alpha).verdict == "fail"


def pass_rate(n, share, difference, *, alpha, trials, seed):
    """Share of simulated gates that pass; the rule is asked once for each distinct table."""
    generator = np.random.default_rng(seed)
    chances = [(share + difference) / 2, (share - difference) / 2, 1 - share]
    draws = generator.multinomial(n, chances, size=trials)[:, :2]
    tables, times = np.unique(draws, axis=0, return_counts=True)
    passed = [
        gates.verdict(
            Pairs(both=0, gained=int(g), lost=int(w), neither=int(n - g - w)), alpha=alpha
        )
        == "pass"
        for g, w in tables
    ]
    return float(times[passed].sum() / trials)


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("n", [100, 240, 1319])
@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2])
def test_equal_versions_pass_no_more_often_than_alpha(n, share, alpha):
    trials = 20_000
    rate = pass_rate(n, share, 0.0, alpha=alpha, trials=trials, seed=11)
    # 99.9 % bound of the binomial error of the simulation itself.
    assert rate <= binom.isf(0.001, trials, alpha) / trials


@pytest.mark.parametrize(("n", "share"), [(240, 0.1), (240, 0.3), (1319, 0.1)])
def test_the_detectable_effect_is_found_four_times_in_five(n, share):
    effect = minimum_detectable_effect(n, discordant_share=share, alpha=0.05)
    assert effect is not None
    rate = pass_rate(n, share, effect, alpha=0.05, trials=20_000, seed=13)
    assert rate == pytest.approx(0.8, abs=0.012)
