from __future__ import annotations

import asyncio

import pytest

from registry import InvalidInput, Jobs, NotFound, random_id, utc_now


def run(scenario):
    """Run a scenario with jobs on a loop of its own; they are stopped at its end."""

    async def whole():
        jobs = Jobs(utc_now, random_id)
        try:
            return await scenario(jobs)
        finally:
            await jobs.stop()

    return asyncio.run(whole())


def test_a_job_reports_and_ends_with_its_result():
    async def scenario(jobs):
        gate = asyncio.Event()

        async def work(handle):
            handle.progress(1, 2, "halfway")
            await gate.wait()
            return {"made": handle.id}

        job = jobs.start("merge", "me", work)
        await asyncio.sleep(0)
        seen = await jobs.wait("me", job.id, 0.01)
        assert (seen.status, seen.done, seen.total, seen.message) == ("running", 1, 2, "halfway")
        gate.set()
        ended = await jobs.wait("me", job.id, 5)
        assert (ended.status, ended.result) == ("done", {"made": job.id})
        assert [j.id for j in jobs.list("me")] == [job.id]
        assert jobs.list("you") == []
        with pytest.raises(NotFound):
            jobs.get("you", job.id)

    run(scenario)


def test_a_failure_says_what_a_person_should_know_and_no_more():
    async def scenario(jobs):
        async def refused(_):
            raise InvalidInput("the suite has no items")

        async def broken(_):
            raise RuntimeError("secret detail")

        said = []
        for work in (refused, broken):
            job = jobs.start("eval", "me", work)
            ended = await jobs.wait("me", job.id, 5)
            assert ended.status == "failed"
            said.append(ended.error)
        assert said[0] == "the suite has no items"
        assert "secret" not in said[1]

    run(scenario)


def test_cancelling_waits_for_the_cleaning_up():
    async def scenario(jobs):
        cleaned = []

        async def work(_):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                cleaned.append(True)

        job = jobs.start("deploy", "me", work)
        await asyncio.sleep(0)
        assert (await jobs.cancel("me", job.id)).status == "cancelled"
        assert cleaned == [True]
        assert (await jobs.cancel("me", job.id)).status == "cancelled"
        # One that is cancelled before its first step counts as cancelled too.
        late = jobs.start("deploy", "me", work)
        assert (await jobs.cancel("me", late.id)).status == "cancelled"

    run(scenario)


def test_the_same_key_is_the_same_job_while_it_runs():
    async def scenario(jobs):
        gate = asyncio.Event()

        async def work(_):
            await gate.wait()
            return {}

        first = jobs.start("merge", "me", work, key="k")
        assert jobs.start("merge", "me", work, key="k").id == first.id
        assert jobs.start("merge", "you", work, key="k").id != first.id
        gate.set()
        await jobs.wait("me", first.id, 5)
        assert jobs.start("merge", "me", work, key="k").id != first.id

    run(scenario)


def test_stopping_ends_what_runs_and_leaves_what_has_ended():
    async def scenario(jobs):
        async def quick(_):
            return {}

        async def slow(_):
            await asyncio.sleep(60)
            return {}

        done = jobs.start("merge", "me", quick)
        await jobs.wait("me", done.id, 5)
        begun = jobs.start("eval", "me", slow)
        await asyncio.sleep(0)
        fresh = jobs.start("eval", "you", slow)
        await jobs.stop()
        assert jobs.get("me", done.id).status == "done"
        assert jobs.get("me", begun.id).status == "cancelled"
        assert jobs.get("you", fresh.id).status == "cancelled"
        assert [job.id for job in jobs.list("me")] == [begun.id, done.id]

    run(scenario)


def test_others_can_neither_wait_for_a_job_nor_cancel_it():
    async def scenario(jobs):
        async def slow(_):
            await asyncio.sleep(60)
            return {}

        job = jobs.start("merge", "me", slow)
        with pytest.raises(NotFound):
            await jobs.wait("you", job.id, 1)
        with pytest.raises(NotFound):
            await jobs.cancel("you", job.id)
        assert jobs.get("me", job.id).status == "running"

    run(scenario)
