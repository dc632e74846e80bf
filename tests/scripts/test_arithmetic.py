from __future__ import annotations

import pytest


@pytest.fixture
def arithmetic(recipe):
    return recipe("arithmetic")


def problem(question: str) -> tuple[str, frozenset[str] | tuple[str, ...]]:
    """An independent reading of a question: the operation and its terms."""
    words = question.split()
    left, operation, right = words[-4:-1]
    return operation, frozenset((left, right)) if operation == "+" else (left, right)


def test_answers_are_what_python_computes(arithmetic):
    for item in arithmetic.training_items(300):
        left, operation, right = item.question.split()[-4:-1]
        expected = int(left) + int(right) if operation == "+" else int(left) - int(right)
        assert item.answer == str(expected)


def test_held_out_items_do_not_occur_in_training_even_with_terms_swapped(arithmetic):
    trained = {problem(item.question) for item in arithmetic.training_items(2560)}
    held_out = arithmetic.held_out_items(240, train_items=2560)
    assert len({problem(item.question) for item in held_out}) == 240
    assert not {problem(item.question) for item in held_out} & trained


def test_the_seeds_alone_would_not_have_kept_them_apart(arithmetic):
    # What the removal is for: some drawn items do occur in training.
    trained = {problem(item.question) for item in arithmetic.training_items(2560)}
    drawn = arithmetic.items(seed=arithmetic.HELD_OUT_SEED, size=480)
    assert {problem(item.question) for item in drawn} & trained


def test_too_few_held_out_items_is_said(arithmetic):
    # Nearly every one of the 8,100 differences and 4,095 sums is trained on here.
    with pytest.raises(SystemExit, match="held-out items are left"):
        arithmetic.held_out_items(200, train_items=100_000)


def test_the_suite_is_the_same_every_time(arithmetic):
    first = arithmetic.suite(50, train_items=640)
    assert first == arithmetic.suite(50, train_items=640)
    assert len(first["items"]) == 50
    assert "{question}" in first["template"]
