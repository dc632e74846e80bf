from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from evals.statistics import (
    Interval,
    Pairs,
    mcnemar_exact,
    mcnemar_power,
    minimum_detectable_effect,
    paired_difference,
    wilson,
)

cell = st.integers(0, 400)
tables = st.builds(Pairs, both=cell, gained=cell, lost=cell, neither=cell)


@given(n=st.integers(1, 5000), share=st.floats(0, 1), confidence=st.floats(0.5, 0.999))
def test_wilson_is_that_of_statsmodels(n, share, confidence):
    correct = round(share * n)
    expected = proportion_confint(correct, n, alpha=1 - confidence, method="wilson")
    found = wilson(correct, n, confidence=confidence)
    assert (found.low, found.high) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"), [(98, 100, 0.930, 0.994), (164, 164, 0.977, 1.0)]
)
def test_wilson_stays_within_the_possible_and_has_width(correct, n, low, high):
    found = wilson(correct, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)
    assert 0 <= found.low < found.high <= 1


def test_wilson_of_nothing_says_nothing():
    assert wilson(0, 0) == Interval(low=0.0, high=1.0)


@pytest.mark.parametrize(("correct", "n"), [(3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_share(correct, n):
    with pytest.raises(ValueError, match="not a share"):
        wilson(correct, n)


@given(gained=cell, lost=cell)
def test_two_sided_mcnemar_is_that_of_statsmodels(gained, lost):
    expected = mcnemar([[7, gained], [lost, 5]], exact=True).pvalue
    assert mcnemar_exact(gained, lost, alternative="two-sided") == pytest.approx(expected, abs=1e-9)


@given(gained=cell, lost=cell)
def test_one_sided_mcnemar_is_half_of_it_on_its_side(gained, lost):
    one = mcnemar_exact(gained, lost)
    if gained > lost:
        assert one == pytest.approx(mcnemar([[0, gained], [lost, 0]]).pvalue / 2, abs=1e-9)
    else:
        assert one >= 0.5


def test_mcnemar_needs_six_pairs_one_way_two_sided_and_five_one_sided():
    assert mcnemar_exact(6, 0, alternative="two-sided") == pytest.approx(2 / 64)
    assert mcnemar_exact(5, 0, alternative="two-sided") > 0.05
    assert mcnemar_exact(5, 0) == pytest.approx(1 / 32)
    assert mcnemar_exact(0, 0) == 1.0


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [
        # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables, ch. 8:
        # complete response before and after consolidation therapy (Cavo et al., 2012).
        (Pairs(both=59, gained=6, lost=16, neither=80), -0.1186, -0.0046),
        # The same: airway hyper-responsiveness (Bentur et al., 2009), three digits.
        (Pairs(both=1, gained=1, lost=7, neither=12), -0.507, -0.026),
        # Altman et al., Statistics with Confidence, 2nd ed., table 6.2, three digits.
        (Pairs(both=14, gained=5, lost=0, neither=22), 0.011, 0.226),
    ],
)
def test_newcombe_gives_the_published_intervals(pairs, low, high):
    found = paired_difference(pairs)
    digits = 5e-5 if round(low, 3) != low else 5e-4
    assert (found.low, found.high) == pytest.approx((low, high), abs=digits)


def newcombe_by_the_paper(pairs, confidence):
    """Method 10 step by step in the paper's letters e, f, g, h; roots of Wilson's quadratic."""
    e, f, g, h = pairs.both, pairs.gained, pairs.lost, pairs.neither
    n, z = e + f + g + h, norm.isf((1 - confidence) / 2)

    def limits(x):
        return sorted(np.roots([1 + z * z / n, -2 * x / n - z * z / n, (x / n) ** 2]).real)

    (l2, u2), (l3, u3) = limits(e + f), limits(e + g)
    p2, p3 = (e + f) / n, (e + g) / n
    margins = (e + f) * (g + h) * (e + g) * (f + h)
    product = e * h - f * g
    corrected = product - n / 2 if product > n / 2 else 0 if product >= 0 else product
    phi = corrected / margins**0.5 if margins else 0
    dl2, du2, dl3, du3 = p2 - l2, u2 - p2, p3 - l3, u3 - p3
    delta = (dl2**2 - 2 * phi * dl2 * du3 + du3**2) ** 0.5
    epsilon = (du2**2 - 2 * phi * du2 * dl3 + dl3**2) ** 0.5
    return p2 - p3 - delta, p2 - p3 + epsilon


@given(pairs=tables, confidence=st.floats(0.8, 0.99))
def test_newcombe_on_random_tables(pairs, confidence):
    found = paired_difference(pairs, confidence=confidence)
    if pairs.n == 0:
        assert found == Interval(low=-1.0, high=1.0)
        return
    expected = newcombe_by_the_paper(pairs, confidence)
    assert (found.low, found.high) == pytest.approx(expected, abs=1e-6)
    assert -1 <= found.low <= (pairs.gained - pairs.lost) / pairs.n <= found.high <= 1


@given(pairs=tables)
def test_newcombe_turns_round_with_the_roles(pairs):
    turned = Pairs(both=pairs.both, gained=pairs.lost, lost=pairs.gained, neither=pairs.neither)
    there, back = paired_difference(pairs), paired_difference(turned)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)


def test_newcombe_covers_the_truth():
    generator = np.random.default_rng(7)
    chances = [0.5, 0.12, 0.05, 0.33]
    draws = generator.multinomial(240, chances, size=2000)
    hits = 0
    for both, gained, lost, neither in draws:
        found = paired_difference(Pairs(both=both, gained=gained, lost=lost, neither=neither))
        hits += found.low <= 0.07 <= found.high
    assert 0.935 <= hits / 2000 <= 0.97


def test_pairs_refuse_negative_counts():
    with pytest.raises(ValueError, match="not negative"):
        Pairs(both=1, gained=-1, lost=0, neither=0)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("n", [200, 500, 1319, 5000])
def test_the_detectable_effect_is_near_the_normal_approximation(n, share):
    """Connor (1987), Biometrics 43, 207-211; the exact test needs a little more than that."""

    def excess(difference):
        needed = norm.isf(0.025) * share**0.5 + norm.isf(0.2) * (share - difference**2) ** 0.5
        return difference * n**0.5 - needed

    approximate = brentq(excess, 0, share)
    exact = minimum_detectable_effect(n, discordant_share=share, alpha=0.025)
    assert exact is not None
    assert approximate < exact < 1.12 * approximate


@given(n=st.integers(20, 400), share=st.floats(0.02, 0.6), alpha=st.floats(0.005, 0.2))
@settings(deadline=None, max_examples=40)
def test_power_at_the_detectable_effect_is_what_it_says(n, share, alpha):
    effect = minimum_detectable_effect(n, discordant_share=share, alpha=alpha)
    if effect is None:
        most = mcnemar_power(n, discordant_share=share, difference=share, alpha=alpha)
        assert most < 0.8
        return
    power = mcnemar_power(n, discordant_share=share, difference=effect, alpha=alpha)
    assert power == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("alpha", [0.05, 0.25])
def test_power_agrees_with_simulation(alpha):
    n, share, difference = 150, 0.2, 0.08
    generator = np.random.default_rng(3)
    chances = [(share + difference) / 2, (share - difference) / 2, 1 - share]
    draws = generator.multinomial(n, chances, size=4000)
    wins = np.mean([mcnemar_exact(int(g), int(w)) < alpha for g, w, _ in draws])
    exact = mcnemar_power(n, discordant_share=share, difference=difference, alpha=alpha)
    assert wins == pytest.approx(exact, abs=4 * (0.25 / 4000) ** 0.5)


def test_no_discordant_pairs_detect_nothing():
    assert minimum_detectable_effect(200, discordant_share=0.0, alpha=0.05) is None
    assert minimum_detectable_effect(0, discordant_share=0.1, alpha=0.05) is None


def test_power_refuses_a_difference_larger_than_the_discordant_share():
    with pytest.raises(ValueError, match="discordant"):
        mcnemar_power(100, discordant_share=0.1, difference=0.2, alpha=0.05)
