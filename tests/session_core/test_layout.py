from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from session_core.layout import micro_batches

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(LENGTHS)
def test_every_row_is_in_exactly_one_micro_batch(lengths: list[int]) -> None:
    batches = micro_batches(lengths, budget=512)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(batch for batch in batches)


@given(LENGTHS)
def test_the_budget_holds_unless_one_row_breaks_it(lengths: list[int]) -> None:
    for batch in micro_batches(lengths, budget=256):
        assert len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= 256


@given(LENGTHS)
def test_it_costs_no_more_than_one_row_at_a_time_or_all_at_once(lengths: list[int]) -> None:
    def cost(batches: list[list[int]]) -> int:
        return sum(max(lengths[row] for row in batch) * len(batch) + 96 for batch in batches)

    best = cost(micro_batches(lengths, budget=10**9, overhead=96))
    assert best <= cost([[row] for row in range(len(lengths))])
    if lengths:
        assert best <= cost([list(range(len(lengths)))])


def test_like_lengths_share_and_unlike_ones_part() -> None:
    assert micro_batches([10, 11, 10, 12]) == [[3, 1, 0, 2]]
    assert micro_batches([1000, 10, 11, 1000]) == [[0, 3], [2, 1]]


def test_nothing_makes_nothing() -> None:
    assert micro_batches([]) == []
