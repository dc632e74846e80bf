from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.graders import GRADERS, ExactGrader, NumericGrader

numeric = NumericGrader()


def right(text: str, reference: str) -> bool:
    found = numeric.extract(text)
    return found is not None and numeric.equal(found.text, reference)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("46", "46"),
        ("46.", "46"),
        ("46.0", "46"),
        ("  46\n", "46"),
        ("The answer is 1,234.", "1234"),
        ("The answer is 1234.", "1,234"),
        ("1,234,567.50 dollars", "1234567.5"),
        ("\\boxed{7}", "7"),
        ("$$\\boxed{1{,}234}$$", "1234"),
        ("10\\,000", "10000"),
        ("1\u202f234", "1234"),
        ("1\u00a0234\u00a0567", "1234567"),
        ("\u22125", "-5"),
        ("-5", "\u22125"),
        ("\u20135", "-5"),
        ("\uff0d5", "-5"),
        ("-0", "0"),
        ("0", "-0"),
        ("-0.0", "0"),
        ("3/4", "0.75"),
        ("\\frac{3}{4}", "3/4"),
        ("-\\dfrac{1}{2}", "-0.5"),
        ("6/8", "3/4"),
        ("1.5e3", "1500"),
        ("$42", "42"),
        ("-$42.50", "-42.5"),
        ("$-5$", "-5"),
        ("\\$18", "18"),
        ("50%", "50"),
        ("7 km/h", "7"),
        ("12 + 34 = 46", "46"),
        ("12+34=46", "46"),
        ("10-3", "3"),
        ("x=-7", "-7"),
        ("(-3)", "-3"),
        ("**42**", "42"),
        ("```\n42\n```", "42"),
        ("First 1, then 2, finally 3", "3"),
        ("1,2,3", "3"),
        ("+8", "8"),
        (".5", "0.5"),
        ("\uff11\uff12", "12"),
        ("\u0661\u0662", "12"),
        ("答案是7。", "7"),
        ("007", "7"),
    ],
)
def test_a_right_answer_is_right_however_it_is_written(text, reference):
    assert right(text, reference)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("46 or 47", "46"),
        ("The answer is 5", "-5"),
        ("-5", "5"),
        ("1234", "1235"),
        ("1.234", "1234"),
        ("46.000001", "46"),
        ("1/0", "0"),
        ("3/4", "0.7500001"),
        ("1e999999999", "1"),
        ("9" * 5000, "9"),
        ("1e-999999999", "0"),
    ],
)
def test_a_wrong_answer_is_wrong(text, reference):
    assert numeric.extract(text) is not None
    assert not right(text, reference)


@pytest.mark.parametrize(
    "text", ["", " ", "I do not know.", "NaN", "infinity", "forty-six", "-", ".", "H2O", "x2", "²"]
)
def test_no_number_is_no_answer(text):
    assert numeric.extract(text) is None


@pytest.mark.parametrize(
    ("text", "cut"),
    [("12", True), ("12.", True), ("12,", True), ("3/", True), ("12 ", False), ("12}", False)],
)
def test_a_number_at_the_very_end_may_be_cut(text, cut):
    found = numeric.extract(text)
    assert found is not None
    assert found.at_end is cut


@given(value=st.integers(-(10**12), 10**12))
def test_every_integer_is_read_back_plain_and_with_separators(value):
    assert right(f"The result: {value}", str(value))
    assert right(f"The result: {value:,}.", str(value))
    assert not right(numeric.wrong(str(value)), str(value))


@given(numerator=st.integers(-999, 999), denominator=st.integers(1, 999))
def test_every_fraction_is_read_back(numerator, denominator):
    reference = str(Fraction(numerator, denominator))
    assert right(f"it is {numerator}/{denominator}", reference)
    assert right(numeric.wrong(reference), numeric.wrong(reference))
    assert not right(numeric.wrong(reference), reference)


@given(text=st.text(max_size=200))
def test_no_text_breaks_it(text):
    found = numeric.extract(text)
    if found is not None:
        numeric.equal(found.text, "1")
    ExactGrader().extract(text)


@pytest.mark.parametrize(
    "bomb",
    [
        "1," * 100_000,
        "1,111" * 50_000,
        "9" * 300_000,
        "-" * 300_000,
        "1e" * 100_000,
        "1/" * 100_000,
        "\\frac{1}" * 40_000,
        "{,}" * 100_000,
        "1\u202f" * 100_000,
    ],
    ids=lambda bomb: repr(bomb[:8]),
)
def test_an_endless_answer_takes_no_endless_time(bomb):
    started = time.perf_counter()
    found = numeric.extract(bomb)
    if found is not None:
        numeric.equal(found.text, "1")
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("reference", ["", "seven", "1 or 2", "1 2", "1/0", "7 km"])
def test_a_reference_is_one_number(reference):
    assert numeric.mistake(reference) is not None


@pytest.mark.parametrize("reference", ["7", "-7", "1,234", "3/4", " 7 ", "$5"])
def test_a_number_may_be_a_reference(reference):
    assert numeric.mistake(reference) is None


def test_exact_takes_the_whole_answer():
    exact = ExactGrader()
    found = exact.extract("  Paris \n")
    assert found is not None
    assert found.at_end
    assert exact.equal(found.text, "Paris")
    assert not exact.equal(found.text, "paris")
    assert exact.extract(" \n") is None
    assert not exact.equal(exact.wrong("Paris"), "Paris")
    assert exact.mistake("Paris") is None
    assert exact.mistake(" ") is not None


def test_names_carry_the_version():
    assert {kind: grader.name for kind, grader in GRADERS.items()} == {
        "numeric": "numeric/1",
        "exact": "exact/1",
    }
