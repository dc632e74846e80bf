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


def test_a_sampler_that_is_in_use_stays(scheduler: Scheduler) -> None:
    running = scheduler.sample("base", sample(200))
    unload = Operation(kind="unload_sampler", params={"sampler_id": "base"})
    with pytest.raises(InvalidInput, match="base is in use"):
        scheduler.execute("", unload).result(WAIT)
    assert len(running.result(WAIT).arrays["tokens"]) == 200
    scheduler.execute("", unload).result(WAIT)
    with pytest.raises(NotFound):
        scheduler.sample("base", sample()).result(WAIT)


def test_a_flood_of_one_tenant_does_not_starve_another(scheduler: Scheduler) -> None:
    flood = [scheduler.sample("base", sample(100, seed=n), tenant="a") for n in range(300)]
    scheduler.sample("base", sample(20), tenant="b").result(WAIT)
    assert sum(future.done() for future in flood) <= 64, "more than one batch came before it"
    for future in flood:
        future.result(WAIT)


def test_samples_that_are_given_up_make_room(scheduler: Scheduler) -> None:
    flood = [scheduler.sample("base", sample(240, seed=n)) for n in range(400)]
    time.sleep(0.2)
    for future in flood:
        scheduler.give_up(future)
    started = time.monotonic()
    assert len(scheduler.sample("base", sample()).result(WAIT).arrays["tokens"]) == 5
    assert sum(f.cancelled() or f.exception(WAIT) is not None for f in flood) > 300
    assert time.monotonic() - started < 10


def test_a_listener_hears_every_token(scheduler: Scheduler) -> None:
    heard: list[tuple[int, int, str]] = []

    def listen(sequence: Any) -> None:
        heard.append((sequence.index, sequence.tokens[-1], sequence.stop_reason))

    result = scheduler.sample("base", sample(7, num_samples=2), listener=listen).result(WAIT)
    rows = np.split(result.arrays["tokens"], result.arrays["tokens.offsets"][1:-1])
    for index, row in enumerate(rows):
        mine = [(token, reason) for number, token, reason in heard if number == index]
        assert [token for token, _ in mine] == row.tolist()
        assert [reason for _, reason in mine] == [""] * 6 + ["length"]


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
