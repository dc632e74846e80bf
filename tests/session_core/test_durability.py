"""Kill -9 at every write and inside the computation: no weight differs, nothing is billed twice.

The SDK's process lives through all of it, with operations outstanding, and notices a delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from registry import Kind


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A point of a process's work, and which time it is reached."""

    point: str
    when: str = "before"
    nth: int = 1
    both: bool = False

    def __str__(self) -> str:
        return f"{self.when} {self.point} {self.nth}{' both' if self.both else ''}"


BOTH_SIDES = ("before", "after")
# What an operation passes on its way: into the log, through the engine, its result.
OF_EVERY_OPERATION = [
    Kill(point=point, when=when, nth=nth)
    for point, times in (
        ("OperationLog.append", (1, 4)),
        ("OperationLog._settle", (1, 4)),
        ("Engine.execute", (1, 4)),
        ("autograd.backward", (1, 2, 3)),
        ("Adam.step", (1, 2)),
    )
    for nth in times
    for when in BOTH_SIDES
]
OF_SNAPSHOTS_AND_SAVES = [
    Kill(point=point, when=when, nth=nth)
    for point, times in (
        ("Snapshots.begin", (1,)),
        ("Snapshots.commit", (1,)),
        ("snapshots.write_state", (1, 2)),
        ("Store.stage", (1,)),
        ("Store.publish", (1,)),
        ("Versions.register", (1,)),
        ("SavedPaths.put", (1,)),
        ("Files.write", (1, 3, 6)),
        ("Files.sync", (1, 2, 4)),
        ("Files.rename", (1,)),
        ("OperationLog.add_sampler", (1,)),
    )
    for nth in times
    for when in BOTH_SIDES
]
OF_BOTH = [
    Kill(point=point, when=when, both=True)
    for point in ("autograd.backward", "AdamW.step", "snapshots.write_state", "Engine.execute")
    for when in BOTH_SIDES
]
A_FEW = [
    Kill(point="OperationLog.append", when="after", nth=2),
    Kill(point="autograd.backward", when="after"),
    Kill(point="OperationLog._settle", nth=3),
    Kill(point="snapshots.write_state", when="after", both=True),
]


def batch(number: int) -> list[types.Datum]:
    """Some datums of uneven lengths, of which the longest needs a micro-batch of its own."""
    generator = np.random.default_rng(number)
    made = []
    for length in generator.integers(3, 40, size=5):
        tokens = generator.integers(3, 260, size=length + 1)
        made.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
                loss_fn_inputs={
                    "target_tokens": tokens[1:].astype(np.int64),
                    "weights": generator.random(length).astype(np.float32),
                },
            )
        )
    return made


def train(server: Any, kills: list[Kill | None]) -> dict[str, Any]:
    """A round of operations for every kill; what came of them."""
    service = server.client()
    client = service.create_lora_training_client("org/tiny", rank=4, seed=7).result()
    adam = types.AdamParams(learning_rate=5e-3, eps=1e-8, grad_clip_norm=1.0, weight_decay=0.01)
    metrics: list[Any] = []
    unreached: list[str] = []
    for number, kill in enumerate(kills):
        if kill is not None:
            server.kill_at(kill.point, kill.when, nth=kill.nth, both=kill.both)
        futures = [
            client.forward_backward(batch(3 * number), "cross_entropy"),
            client.forward_backward(batch(3 * number + 1), "cross_entropy"),
            client.optim_step(adam),
            client.save_state(f"state-{number}"),
            client.forward_backward(batch(3 * number + 2), "cross_entropy"),
            client.optim_step(adam),
            # The last: the SDK numbers it a moment after the call.
            client.save_weights_for_sampler(f"weights-{number}"),
        ]
        results = [future.result(timeout=180) for future in futures]
        client.save_weights_and_get_sampling_client().result(timeout=180)
        metrics.append([result.metrics for result in results if hasattr(result, "metrics")])
        if kill is not None and not (server.home / "killed.json").exists():
            unreached.append(str(kill))
    saved = [
        version
        for version in server.registry.versions.list(server.tenant_id, limit=200).items
        if version.provenance.get("run") == client.model_id
    ]
    (session_id, _) = client.model_id.split(":", 1)
    billed = [
        (row.kind, row.tokens, row.operations)
        for row in server.registry.usage.totals(server.tenant_id, by="session")
        if row.group == session_id
    ]
    service.close("success")
    return {
        "unreached": unreached,
        "metrics": metrics,
        "digests": {version.provenance["seq"]: version.digest for version in saved},
        "kinds": sorted(version.kind for version in saved),
        "billed": billed,
    }


def check(server: Any, kills: list[Kill]) -> None:
    # The disturbed run first: what it publishes is not in the store yet.
    with server.kept_up():
        disturbed = train(server, list(kills))
    undisturbed = train(server, [None] * len(kills))
    assert disturbed["unreached"] == []
    assert disturbed["metrics"] == undisturbed["metrics"]
    # The bytes of every save, both moments of Adam's among them.
    assert disturbed["digests"] == undisturbed["digests"]
    expected = [Kind.CHECKPOINT] * len(kills) + [Kind.WEIGHTS] * len(kills)
    assert disturbed["kinds"] == undisturbed["kinds"] == sorted(expected)
    assert disturbed["billed"] == undisturbed["billed"]


@pytest.fixture
def killable(server: Any) -> Any:
    server.restart(killable=True, snapshot_steps=2, gap_seconds=60)
    return server


@pytest.mark.timeout(240)
def test_a_few_kills_change_no_bit(killable):
    check(killable, A_FEW)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "kills",
    [OF_EVERY_OPERATION, OF_SNAPSHOTS_AND_SAVES, OF_BOTH],
    ids=["operations", "snapshots-and-saves", "both"],
)
def test_no_kill_changes_a_bit(killable, kills):
    check(killable, kills)


def datum() -> types.Datum:
    return batch(0)[0]


def test_an_engine_that_hangs_is_ended_and_the_operation_done(server):
    server.restart(killable=True, stall_seconds=3)
    client = server.client().create_lora_training_client("org/tiny", rank=4, seed=7).result()
    before = client.forward([datum()], "cross_entropy").result()
    (server.home / "hang").touch()
    after = client.forward([datum()], "cross_entropy").result(timeout=120)
    assert after.metrics == before.metrics
    assert "made no progress for" in (server.home / "serve.log").read_text()


def test_what_hangs_again_and_again_is_failed_and_says_so(server):
    server.restart(killable=True, stall_seconds=2)
    client = server.client().create_lora_training_client("org/tiny", rank=4, seed=7).result()
    before = client.forward([datum()], "cross_entropy").result()
    (server.home / "hang").touch()
    stuck = client.forward_backward([datum()], "cross_entropy")
    server.wait_until(lambda: not (server.home / "hang").exists(), seconds=60)
    (server.home / "hang").touch()
    with pytest.raises(tinker.RequestFailedError, match=r"died 2 times .* it was stuck: no prog"):
        stuck.result(timeout=120)
    assert client.forward([datum()], "cross_entropy").result().metrics == before.metrics


def test_memory_that_runs_out_fails_the_operation_alone(server):
    server.restart(killable=True)
    client = server.client().create_lora_training_client("org/tiny", rank=4, seed=7).result()
    client.forward_backward([datum()], "cross_entropy").result()
    pid = server.engine_pid()
    (server.home / "no-memory").touch()
    large = [datum() for _ in range(1000)]
    with pytest.raises(tinker.RequestFailedError, match="out of memory"):
        client.forward_backward(large, "cross_entropy").result()
    (server.home / "no-memory").unlink()
    # No new engine, and the gradient is the first batch's alone.
    norm = client.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics
    assert server.engine_pid() == pid
    other = server.client().create_lora_training_client("org/tiny", rank=4, seed=7).result()
    other.forward_backward([datum()], "cross_entropy").result()
    assert other.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics == norm
