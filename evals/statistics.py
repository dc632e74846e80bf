"""Numbers about proportions on the same items. Knows no database and no model.

scipy has neither McNemar's test nor an interval for a paired difference; they are here, each
with the source of its formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, binomtest

Alternative = Literal["greater", "two-sided"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval: a share, or a difference of two, in units of 1 (not percent)."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The 2x2 table of two versions on the same items: who had which items right."""

    both: int
    gained: int
    """Right with the candidate only."""
    lost: int
    """Right with the baseline only."""
    neither: int

    def __post_init__(self) -> None:
        if min(self.both, self.gained, self.lost, self.neither) < 0:
            raise ValueError(f"counts are not negative: {self}")

    @property
    def n(self) -> int:
        """All items."""
        return self.both + self.gained + self.lost + self.neither

    @property
    def discordant(self) -> int:
        """Items on which the two differ; they alone decide."""
        return self.gained + self.lost


def wilson(correct: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval for a share; stays within 0 and 1 and is never of width 0.

    Source: Wilson (1927), J. Am. Stat. Assoc. 22, 209-212; recommended by Brown, Cai and
    DasGupta (2001), Statist. Sci. 16, 101-133. With no items: 0 to 1.
    """
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} is not a share")
    if n == 0:
        return Interval(low=0.0, high=1.0)
    found = binomtest(correct, n).proportion_ci(confidence_level=confidence, method="wilson")
    return Interval(low=float(found.low), high=float(found.high))


def mcnemar_exact(gained: int, lost: int, *, alternative: Alternative = "greater") -> float:
    """The p value of McNemar's exact test.

    Under the null hypothesis each discordant pair falls either way with chance 1/2, so the
    test is the binomial one on `gained` of `gained + lost`. "greater": the candidate is
    better. With no discordant pair: 1.

    Source: McNemar (1947), Psychometrika 12, 153-157; exact form as in Fagerland, Lydersen
    and Laake (2013), BMC Med. Res. Methodol. 13:91, "exact conditional test".
    """
    if gained + lost == 0:
        return 1.0
    return float(binomtest(gained, gained + lost, 0.5, alternative=alternative).pvalue)


def paired_difference(pairs: Pairs, *, confidence: float = 0.95) -> Interval:
    """Newcombe's hybrid score interval for candidate minus baseline, on the same items.

    Wilson's limits of the two shares are joined by square-and-add, with the correlation of
    the two, phi, pulled towards 0 by a continuity correction.

    Source: Newcombe (1998), Statist. Med. 17, 2635-2650, method 10. With no items: -1 to 1.
    """
    n = pairs.n
    if n == 0:
        return Interval(low=-1.0, high=1.0)
    right, base_right = pairs.both + pairs.gained, pairs.both + pairs.lost
    share, base_share = right / n, base_right / n
    own = wilson(right, n, confidence=confidence)
    base = wilson(base_right, n, confidence=confidence)
    phi = _corrected_phi(pairs)

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    difference = share - base_share
    return Interval(
        low=max(difference - reach(share - own.low, base.high - base_share), -1.0),
        high=min(difference + reach(own.high - share, base_share - base.low), 1.0),
    )


def _corrected_phi(pairs: Pairs) -> float:
    right, base_right, n = pairs.both + pairs.gained, pairs.both + pairs.lost, pairs.n
    margins = right * (n - right) * base_right * (n - base_right)
    if margins == 0:
        return 0.0
    product = float(pairs.both * pairs.neither - pairs.gained * pairs.lost)
    if product > 0:
        product = max(product - n / 2, 0.0)
    return product / math.sqrt(margins)


def mcnemar_power(n: int, *, discordant_share: float, difference: float, alpha: float) -> float:
    """The chance that the one-sided exact McNemar test on `n` items gives p < alpha.

    `discordant_share` (0 to 1): the chance that the two versions differ on an item;
    `difference`: candidate minus baseline, at most `discordant_share`. Exact: the sum over
    the binomial number of discordant pairs of the conditional test's power, as in Duffy
    (1984), Biometrics 40, 1005-1015.
    """
    if not 0 < discordant_share <= 1 or abs(difference) > discordant_share:
        raise ValueError(f"a difference of {difference} needs that share of discordant pairs")
    m = np.arange(n + 1)
    # The least number of gains among m pairs with P(gains or more) < alpha.
    below = binom.isf(alpha, m, 0.5)
    critical = below + np.where(binom.sf(below, m, 0.5) < alpha, 1, 2)
    gain = min((discordant_share + difference) / (2 * discordant_share), 1.0)
    reached = binom.sf(critical - 1, m, gain)
    return float(np.sum(binom.pmf(m, n, discordant_share) * reached))


def minimum_detectable_effect(
    n: int, *, discordant_share: float, alpha: float, power: float = 0.8
) -> float | None:
    """The least true difference that the one-sided exact test finds with chance `power`.

    None when even a candidate that loses nothing would not be found: then `n` items with so
    few discordant pairs cannot decide anything.
    """
    if n == 0 or discordant_share <= 0:
        return None

    def missing(difference: float) -> float:
        found = mcnemar_power(
            n, discordant_share=discordant_share, difference=difference, alpha=alpha
        )
        return found - power

    if missing(discordant_share) < 0:
        return None
    if missing(0.0) >= 0:
        return 0.0
    return float(brentq(missing, 0.0, discordant_share, xtol=1e-6))
