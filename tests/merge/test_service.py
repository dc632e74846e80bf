from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys

import psutil
import pytest

from merge import MergeService
from registry import InvalidInput, Jobs, Kind, NotFound, random_id, utc_now

# The real job, held up between its start and its end until a file is there.
SLOW = (sys.executable, "-c", "import time, runpy; time.sleep(30)")


@pytest.fixture
def merging(world, tmp_path):
    """Run a scenario with a service on a loop of its own: merging(scenario, **options)."""

    def run(scenario, **options):
        async def whole():
            jobs = Jobs(utc_now, random_id)
            service = MergeService(world.registry, jobs, tmp_path / "logs", **options)
            try:
                return await scenario(service, jobs)
            finally:
                await jobs.stop()

        try:
            return asyncio.run(whole())
        finally:
            world.registry.db.close()

    return run


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def ended(jobs, world, job):
    while job.status == "running":
        job = await jobs.wait(world.tenant_id, job.id, 30)
    return job


def test_a_merge_is_a_derived_version_with_its_parents(world, merging):
    async def scenario(service, jobs):
        first = service.start(world.tenant_id, "sums/1")
        assert service.start(world.tenant_id, "sums/1").id == first.id
        done = await ended(jobs, world, first)
        assert done.status == "done", done.error
        again = await ended(jobs, world, service.start(world.tenant_id, "sums/1"))
        return done.result, again.result

    made, again = merging(scenario)
    assert again["id"] == made["id"]
    version = world.registry.versions.get(world.tenant_id, "sums/2")
    assert version.id == made["id"]
    assert (version.kind, version.origin.value) == (Kind.MERGED, "merge")
    assert set(version.parents) == {world.adapter.id, world.base.id}
    assert version.base_digest == world.base.digest
    assert version.provenance["merge"]
    assert world.registry.store.verify(version.digest) == []
    assert world.staging() == []
    assert children() == []


def test_another_type_is_another_version(world, merging):
    async def scenario(service, jobs):
        for dtype in ("float32", "float16"):
            job = await ended(jobs, world, service.start(world.tenant_id, "sums/1", dtype=dtype))
            assert job.status == "done", job.error

    merging(scenario)
    versions = [world.registry.versions.get(world.tenant_id, f"sums/{n}") for n in (2, 3)]
    assert versions[0].digest != versions[1].digest
    assert versions[0].size_bytes > versions[1].size_bytes


def test_cancelled_it_leaves_no_version_no_litter_no_process(world, merging):
    before = world.packages()

    async def scenario(service, jobs):
        job = service.start(world.tenant_id, "sums/1")
        while not children():
            await asyncio.sleep(0.01)
        return await jobs.cancel(world.tenant_id, job.id)

    assert merging(scenario, command=SLOW).status == "cancelled"
    assert world.packages() == before
    assert world.staging() == []
    assert children() == []
    with pytest.raises(NotFound):
        world.registry.versions.get(world.tenant_id, "sums/2")


def test_a_job_that_is_killed_says_so_and_leaves_nothing(world, merging):
    before = world.packages()

    async def scenario(service, jobs):
        job = service.start(world.tenant_id, "sums/1")
        while not children():
            await asyncio.sleep(0.01)
        os.kill(children()[0].pid, signal.SIGKILL)
        return await ended(jobs, world, job)

    job = merging(scenario, command=SLOW)
    assert job.status == "failed"
    assert "signal 9" in job.error
    assert "nothing was registered" in job.error
    assert world.packages() == before
    assert world.staging() == []


def test_a_damaged_source_is_refused_by_name(world, merging):
    folder = world.registry.store.path(world.base.digest)
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)

    async def scenario(service, jobs):
        return await ended(jobs, world, service.start(world.tenant_id, "sums/1"))

    job = merging(scenario)
    assert job.status == "failed"
    assert "model.safetensors" in job.error
    assert world.staging() == []


def test_what_cannot_be_merged_is_refused_at_once(world, merging, shared_adapter, tmp_path):
    orphan = world.register(
        shared_adapter, Kind.WEIGHTS, group="orphan", base_digest="sha256:" + "0" * 64
    )

    async def scenario(service, jobs):
        for reference, error, said in (
            ("tiny/1", InvalidInput, "only an adapter"),
            ("sums/9", NotFound, "sums/9"),
            (orphan.reference, NotFound, "not registered"),
        ):
            with pytest.raises(error, match=said):
                service.start(world.tenant_id, reference)
        with pytest.raises(InvalidInput, match="int4"):
            service.start(world.tenant_id, "sums/1", dtype="int4")

    merging(scenario)


def test_an_adapter_of_an_unknown_kind_is_refused_by_name(
    world, merging, shared_adapter, tmp_path, tiny
):
    folder = tmp_path / "strange"
    shutil.copytree(shared_adapter, folder)
    tiny.edit_json(folder / "adapter_config.json", use_dora=True)
    strange = world.register(folder, Kind.WEIGHTS, group="strange", base_digest=world.base.digest)

    async def scenario(service, jobs):
        return await ended(jobs, world, service.start(world.tenant_id, strange.reference))

    job = merging(scenario)
    assert job.status == "failed"
    assert "use_dora" in job.error
    assert world.staging() == []
