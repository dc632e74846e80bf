from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from registry.errors import InvalidInput, NotFound
from session_core.engine import Engine
from session_core.operations import Operation
from session_core.scheduler import Scheduler

Make = Callable[..., Any]
WAIT = 60


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine)
    scheduler.execute("", load()).result(WAIT)
    yield scheduler
    scheduler.close()


def load(sampler_id: str = "base") -> Operation:
    return Operation(kind="load_sampler", params={"sampler_id": sampler_id, "folder": None})


def sample(max_tokens: int = 5, **params: Any) -> Operation:
    return Operation(
        kind="sample",
        params={"max_tokens": max_tokens, "stop": [], "seed": 1, **params},
        arrays={"tokens": np.arange(3, 9, dtype=np.int32)},
    )


def train(arrays: Any) -> Operation:
    return Operation(kind="forward_backward", params={"loss_fn": "cross_entropy"}, arrays=arrays)


def test_operations_run_in_the_order_they_came(scheduler: Scheduler, datums: Make) -> None:
    scheduler.execute("run", Operation(kind="create_run", params={"rank": 2}))
    done: list[int] = []
    futures = []
    for index in range(10):
        future = scheduler.execute("run", train(datums(seed=index)))
        future.add_done_callback(lambda _, index=index: done.append(index))
        futures.append(future)
    for future in futures:
        future.result(WAIT)
    assert done == list(range(10))


def test_one_failure_fails_alone(scheduler: Scheduler, datums: Make) -> None:
    missing = scheduler.execute("nobody", train(datums()))
    wrong = scheduler.sample("base", sample(temperature=-1))
    unknown = scheduler.sample("nobody", sample())
    good = scheduler.sample("base", sample())
    assert len(good.result(WAIT).arrays["tokens"]) == 5
    with pytest.raises(NotFound):
        missing.result(WAIT)
    with pytest.raises(NotFound):
        unknown.result(WAIT)
    with pytest.raises(InvalidInput):
        wrong.result(WAIT)


def test_a_flood_of_samples_does_not_starve_training(scheduler: Scheduler, datums: Make) -> None:
    scheduler.execute("run", Operation(kind="create_run", params={"rank": 2})).result(WAIT)
    flood = [scheduler.sample("base", sample(200, seed=index)) for index in range(200)]
    started = time.monotonic()
    for turn in range(3):
        scheduler.execute("run", train(datums(seed=turn))).result(WAIT)
    trained = time.monotonic() - started
    assert not all(future.done() for future in flood), "the flood was over too soon to tell"
    for future in flood:
        future.result(WAIT)
    assert trained < time.monotonic() - started


def test_a_flood_of_training_does_not_starve_samples(scheduler: Scheduler, datums: Make) -> None:
    scheduler.execute("run", Operation(kind="create_run", params={"rank": 2})).result(WAIT)
    flood = [scheduler.execute("run", train(datums(40, seed=index))) for index in range(100)]
    scheduler.sample("base", sample(20)).result(WAIT)
    assert not all(future.done() for future in flood)
    for future in flood:
        future.result(WAIT)


def test_a_sampler_leaves_after_its_last_request(scheduler: Scheduler) -> None:
    running = scheduler.sample("base", sample(200))
    leaving = scheduler.execute("", Operation(kind="unload_sampler", params={"sampler_id": "base"}))
    assert len(running.result(WAIT).arrays["tokens"]) == 200
    leaving.result(WAIT)
    with pytest.raises(NotFound):
        scheduler.sample("base", sample()).result(WAIT)


def test_work_that_was_given_up_is_not_done(scheduler: Scheduler, datums: Make) -> None:
    scheduler.execute("run", Operation(kind="create_run", params={"rank": 2}))
    futures = [scheduler.execute("run", train(datums(60, seed=index))) for index in range(10)]
    given_up = scheduler.sample("base", sample())
    cancelled = [future.cancel() for future in futures[5:]]
    given_up.cancel()
    for future in futures[:5]:
        future.result(WAIT)
    scheduler.sample("base", sample()).result(WAIT)
    assert any(cancelled)
