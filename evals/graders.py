"""Graders: what of an answer counts, and whether it is right.

A grader is part of a suite's digest by its kind; `VERSION` goes into the evidence, so that
runs graded by different rules are never compared. Raise it with every change of a rule.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

VERSION = 1

# Longer numbers are kept as text and equal nothing: an answer must not cost us memory.
_MAX_DIGITS = 100
_MAX_EXPONENT = 100


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """The part of an answer that counts."""

    text: str
    """As shown to people."""
    at_end: bool
    """Nothing follows it, so it may be cut short if the token limit ended the answer."""


class Grader(Protocol):
    """Takes the answer out of a text and compares it with the reference."""

    @property
    def name(self) -> str:
        """Kind and version, as recorded in the evidence: `numeric/1`."""
        ...

    def extract(self, text: str) -> Extracted | None:
        """What counts in `text`; None when there is no answer in it."""
        ...

    def equal(self, extracted: str, reference: str) -> bool:
        """Whether an extracted text is the reference answer."""
        ...

    def wrong(self, reference: str) -> str:
        """An answer that is certainly wrong, for the self-test."""
        ...

    def mistake(self, reference: str) -> str | None:
        """Why `reference` cannot be a reference answer of this grader; None when it can."""
        ...


class NumericGrader:
    """The last number of the answer wins, however it is written.

    Understood: thousands separators (a comma or a no-break space), decimals, exponents,
    fractions (3/4 and LaTeX \\frac{3}{4}), any dash as a minus sign, currency signs, digits of
    any script. A dash after a digit, letter or closing bracket is an operator or a hyphen: the
    number of "10-3" is 3. Digits right after a Latin letter (x2, H2O) are no number.
    """

    name = f"numeric/{VERSION}"

    def extract(self, text: str) -> Extracted | None:
        plain = _plain(text)
        last = deque(_NUMBER.finditer(plain), maxlen=1)
        if not last:
            return None
        rest = plain[last[0].end() :]
        return Extracted(text=last[0]["number"], at_end=not rest.strip(".,/"))

    def equal(self, extracted: str, reference: str) -> bool:
        value, right = _value(extracted), _reference(reference)
        return value is not None and value == right

    def wrong(self, reference: str) -> str:
        right = _reference(reference)
        return "0" if right is None else str(right + 1)

    def mistake(self, reference: str) -> str | None:
        if _reference(reference) is None:
            return f"{reference!r} is not one number"
        return None


class ExactGrader:
    """The whole answer is the reference, but for white space around it."""

    name = f"exact/{VERSION}"

    def extract(self, text: str) -> Extracted | None:
        kept = text.strip()
        return Extracted(text=kept, at_end=True) if kept else None

    def equal(self, extracted: str, reference: str) -> bool:
        return extracted == reference.strip()

    def wrong(self, reference: str) -> str:
        return f"not {reference}"

    def mistake(self, reference: str) -> str | None:
        return None if reference.strip() else "it is blank"


GRADERS: dict[str, Grader] = {"numeric": NumericGrader(), "exact": ExactGrader()}
"""By the kind a suite names."""


_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"), "-")
_SPACED_THOUSANDS = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_NUMBER = re.compile(
    # Never within a longer run of digits, or right after a letter.
    r"(?<![A-Za-z0-9])"
    r"(?P<number>(?:(?<![A-Za-z0-9)\]}])-)?"
    rf"[$€£¥]?{_UNSIGNED}(?:/[0-9]+)?)"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac ?\{ ?(-?[0-9]+) ?\} ?\{ ?([0-9]+) ?\}")


def _plain(text: str) -> str:
    """ASCII digits, one kind of dash and of thousands separator, no LaTeX number markup."""
    text = text.translate(_DASHES)
    text = "".join(
        str(unicodedata.decimal(char)) if not char.isascii() and char.isdecimal() else char
        for char in text
    )
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")
    return _LATEX_FRACTION.sub(r"\1/\2", _SPACED_THOUSANDS.sub(",", text))


def _value(number: str) -> Fraction | None:
    """The exact value of a matched number; None for one too large to handle."""
    bare = re.sub(r"[$€£¥,]", "", number)
    exponent = bare.lower().partition("e")[2].partition("/")[0]
    if sum(map(str.isdigit, bare)) > _MAX_DIGITS:
        return None
    if exponent and abs(int(exponent)) > _MAX_EXPONENT:
        return None
    numerator, _, denominator = bare.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / (int(denominator) if denominator else 1)


def _reference(answer: str) -> Fraction | None:
    """The value of a reference answer, which is one number and nothing else."""
    plain = _plain(answer).strip()
    match = _NUMBER.fullmatch(plain)
    return _value(match["number"]) if match else None
