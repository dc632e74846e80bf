from __future__ import annotations

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from session_core.waiting import Waiting

Pushes = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=12)


def filled(pushes: list[tuple[str, int]]) -> tuple[Waiting[tuple[str, int]], dict[str, list[int]]]:
    waiting: Waiting[tuple[str, int]] = Waiting()
    pushed: dict[str, list[int]] = {}
    for tenant, count in pushes:
        start = len(pushed.setdefault(tenant, []))
        numbers = list(range(start, start + count))
        pushed[tenant] += numbers
        waiting.push(tenant, [(tenant, number) for number in numbers])
    return waiting, pushed


@given(Pushes)
def test_each_tenant_is_served_in_order_and_nothing_is_lost(pushes: list[tuple[str, int]]) -> None:
    waiting, pushed = filled(pushes)
    drawn: dict[str, list[int]] = {tenant: [] for tenant in pushed}
    for tenant, number in waiting.draw(Counter()):
        drawn[tenant].append(number)
    assert drawn == pushed
    assert len(waiting) == 0


@given(Pushes, st.integers(0, 30))
def test_nobody_is_more_than_one_ahead_of_who_still_waits(
    pushes: list[tuple[str, int]], count: int
) -> None:
    waiting, pushed = filled(pushes)
    have = Counter(tenant for tenant, _ in islice(waiting.draw(Counter()), count))
    for tenant, numbers in pushed.items():
        if have[tenant] < len(numbers):
            assert all(have[other] <= have[tenant] + 1 for other in pushed)


def test_who_runs_much_already_waits_for_the_others() -> None:
    waiting, _ = filled([("a", 5), ("b", 5)])
    drawn = [tenant for tenant, _ in islice(waiting.draw(Counter(a=3)), 4)]
    assert drawn == ["b", "b", "b", "a"]


def test_putting_back_and_removing() -> None:
    waiting, _ = filled([("a", 3)])
    first = next(waiting.draw(Counter()))
    waiting.put_back("a", first)
    waiting.remove("a", lambda item: item[1] == 1)
    waiting.remove("nobody", lambda item: True)
    assert list(waiting.draw(Counter())) == [("a", 0), ("a", 2)]
