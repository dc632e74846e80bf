from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from session_core.turns import Turns


class Time:
    """A clock that goes on by what operations take."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def run(lines, seconds):
    """Lines of (tenant, operations, length of one): whose turn it was, until the time is over."""
    time = Time()
    turns = Turns(time)
    had: list[str] = []

    async def line(tenant, count, length):
        for _ in range(count):
            async with turns.turn(tenant):
                had.append(tenant)
                time.now += length
                await asyncio.sleep(0)
                if time.now >= seconds:
                    return

    async def all_of_them():
        await asyncio.gather(*(line(*words) for words in lines))

    asyncio.run(all_of_them())
    return had


def test_a_flood_of_runs_gets_no_more_than_one_run_does():
    had = run([("flood", 1000, 1.0)] * 20 + [("quiet", 1000, 1.0)], 200)
    counts = Counter(had[:200])
    assert abs(counts["flood"] - counts["quiet"]) <= 2


def test_time_is_shared_and_not_the_number_of_turns():
    had = run([("long", 1000, 10.0)] * 3 + [("short", 1000, 1.0)] * 3, 1000)
    counts = Counter(had)
    assert counts["short"] == pytest.approx(10 * counts["long"], rel=0.1)


def test_who_paused_has_saved_up_nothing():
    time = Time()
    turns = Turns(time)
    had = []

    async def line(tenant, count, first=0.0):
        while time.now < first:
            await asyncio.sleep(0)
        for _ in range(count):
            async with turns.turn(tenant):
                had.append(tenant)
                time.now += 1.0
                await asyncio.sleep(0)

    async def both():
        await asyncio.gather(line("steady", 200), line("late", 50, first=100.0))

    asyncio.run(both())
    late = had.index("late")
    together = Counter(had[late : late + 40])
    assert abs(together["late"] - together["steady"]) <= 2


def test_within_a_tenant_it_is_first_come_first_served():
    async def check():
        turns = Turns(Time())
        had = []

        async def once(name):
            async with turns.turn("one"):
                had.append(name)

        async with turns.turn("one"):
            tasks = [asyncio.create_task(once(n)) for n in range(5)]
            await settle()
        await asyncio.gather(*tasks)
        return had

    assert asyncio.run(check()) == list(range(5))


def test_whatever_is_cancelled_and_whenever_one_at_a_time_has_its_turn():
    async def check(seed):
        chance = random.Random(seed)
        turns = Turns(Time())
        inside = 0
        done = 0

        async def once(tenant):
            nonlocal inside, done
            async with turns.turn(tenant):
                inside += 1
                assert inside == 1
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1
                done += 1

        tasks = [asyncio.create_task(once(f"t{n % 3}")) for n in range(60)]
        while not all(task.done() for task in tasks):
            chance.choice(tasks).cancel() if chance.random() < 0.3 else None
            await asyncio.sleep(0)
        cancelled = sum(task.cancelled() for task in tasks)
        assert done == 60 - cancelled
        assert 0 < cancelled < 60
        # It is free again.
        async with asyncio.timeout(1), turns.turn("last"):
            pass

    for seed in range(40):
        asyncio.run(check(seed))


def test_a_failure_passes_the_turn_on():
    async def check():
        turns = Turns(Time())
        with pytest.raises(ZeroDivisionError):
            async with turns.turn("one"):
                raise ZeroDivisionError
        async with asyncio.timeout(1), turns.turn("two"):
            pass

    asyncio.run(check())
