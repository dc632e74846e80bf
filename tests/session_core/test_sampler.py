"""Sampling against transformers.generate and against a recomputation of the logprobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry.errors import InvalidInput, NotFound
from session_core.engine import Engine
from session_core.operations import Operation, Result, split
from session_core.sampler import Decoder, sample_all
from session_core.sequences import Job

Make = Callable[..., Any]
RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(3, 380, size=length) for length in (5, 17, 1, 40, 9, 30, 12, 2)]


def sample(prompt: Any, **params: Any) -> Operation:
    params.setdefault("max_tokens", 12)
    return Operation(
        kind="sample", params=params, arrays={"tokens": np.asarray(prompt, dtype=np.int32)}
    )


def sequences(result: Result) -> list[list[int]]:
    rows = split(result.arrays["tokens"], result.arrays["tokens.offsets"])
    return [row.tolist() for row in rows]


@pytest.fixture
def trained(engine: Engine, datums: Make, tmp_path: Path) -> Engine:
    """An engine with the samplers `base` and `adapted`."""
    engine.execute("run", Operation(kind="create_run", params={"rank": 4}))
    for turn in range(4):
        engine.execute(
            "run",
            Operation(
                kind="forward_backward",
                params={"loss_fn": "cross_entropy"},
                arrays=datums(seed=turn),
            ),
        )
        engine.execute("run", Operation(kind="optim_step", params={"learning_rate": 1e-2}))
    folder = tmp_path / "adapter"
    folder.mkdir()
    engine.execute("run", Operation(kind="save_weights", params={"folder": str(folder)}))
    for name, place in (("base", None), ("adapted", str(folder))):
        params = {"sampler_id": name, "folder": place}
        engine.execute("", Operation(kind="load_sampler", params=params))
    return engine


@pytest.mark.parametrize("name", ["base", "adapted"])
def test_greedy_equals_generate(trained: Engine, name: str) -> None:
    results = sample_all(
        trained, name, [sample(prompt, temperature=0, stop=[]) for prompt in PROMPTS]
    )
    trained.adapters.use(trained.sampler_slot(name))
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = trained.base.model.generate(
            input_ids=torch.tensor(prompt[None]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert sequences(result) == [expected[0, len(prompt) :].tolist()]
        assert result.params["stop_reasons"] == ["length"]


@pytest.mark.parametrize("name", ["base", "adapted"])
def test_logprobs_equal_a_recomputation(trained: Engine, name: str) -> None:
    operations = [sample(p, seed=i, stop=[], prompt_logprobs=True) for i, p in enumerate(PROMPTS)]
    results = sample_all(trained, name, operations)
    trained.adapters.use(trained.sampler_slot(name))
    for prompt, result in zip(PROMPTS, results, strict=True):
        whole = torch.tensor([*prompt.tolist(), *sequences(result)[0]])
        with torch.no_grad():
            scores = trained.base.logits(whole[None])[0].log_softmax(-1)
        expected = scores[:-1].gather(1, whole[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(
            result.arrays["logprobs"], expected[len(prompt) - 1 :], atol=2e-4
        )
        prompt_logprobs = result.arrays["prompt_logprobs"]
        assert np.isnan(prompt_logprobs[0])
        np.testing.assert_allclose(prompt_logprobs[1:], expected[: len(prompt) - 1], atol=2e-4)


def test_adapter_and_base_differ(trained: Engine) -> None:
    (one,) = sample_all(trained, "base", [sample(PROMPTS[0], temperature=0)])
    (two,) = sample_all(trained, "adapted", [sample(PROMPTS[0], temperature=0)])
    assert sequences(one) != sequences(two)


def test_seeds_repeat_alone_and_in_company(trained: Engine) -> None:
    operations = [sample(p, seed=i, stop=[], top_k=i * 5) for i, p in enumerate(PROMPTS)]
    together = [sequences(result) for result in sample_all(trained, "base", operations)]
    alone = [sequences(sample_all(trained, "base", [item])[0]) for item in operations]
    again = [sequences(sample_all(trained, "base", [item])[0]) for item in operations]
    assert alone == again
    assert together == alone
    other = sample_all(trained, "base", [sample(PROMPTS[0], seed=99, stop=[])])
    assert sequences(other[0]) != alone[0]


def test_samples_of_one_prompt_share_it_and_differ(trained: Engine) -> None:
    (result,) = sample_all(
        trained, "base", [sample(PROMPTS[1], seed=1, num_samples=5, stop=[], max_tokens=6)]
    )
    rows = sequences(result)
    assert len(rows) == 5
    assert len({tuple(row) for row in rows}) == 5
    assert result.params["stop_reasons"] == ["length"] * 5
    (first,) = sample_all(trained, "base", [sample(PROMPTS[1], seed=1, stop=[], max_tokens=6)])
    assert sequences(first)[0] == rows[0]


def test_stop_tokens_end_a_sequence_and_stay_in_it(trained: Engine) -> None:
    (free,) = sample_all(trained, "base", [sample(PROMPTS[3], temperature=0, stop=[])])
    tokens = sequences(free)[0]
    (cut,) = sample_all(trained, "base", [sample(PROMPTS[3], temperature=0, stop=[tokens[4]])])
    end = tokens.index(tokens[4])
    assert sequences(cut)[0] == tokens[: end + 1]
    assert cut.params["stop_reasons"] == ["stop"]


def test_none_stops_at_eos_and_an_empty_list_does_not(trained: Engine) -> None:
    def run(stop: Any) -> tuple[list[int], str]:
        # Two hundred draws at a high temperature meet every one of 384 tokens often enough.
        (result,) = sample_all(
            trained, "base", [sample([5], seed=1, temperature=50.0, stop=stop, max_tokens=255)]
        )
        return sequences(result)[0], result.params["stop_reasons"][0]

    tokens, reason = run([])
    assert (len(tokens), reason) == (255, "length")
    (eos,) = trained.base.eos
    stopped, why = run(None)
    if eos in tokens:
        assert (stopped, why) == (tokens[: tokens.index(eos) + 1], "stop")
    else:
        assert (stopped, why) == (tokens, "length")


def test_stop_texts_end_with_the_token_that_completes_them(trained: Engine) -> None:
    (free,) = sample_all(trained, "base", [sample(PROMPTS[3], temperature=0, stop=[])])
    tokens = sequences(free)[0]
    decode = trained.base.tokenizer.decode
    text = decode(tokens[2:5])
    (cut,) = sample_all(trained, "base", [sample(PROMPTS[3], temperature=0, stop=[text])])
    got = sequences(cut)[0]
    assert text in decode(got)
    assert text not in decode(got[:-1])
    assert cut.params["stop_reasons"] == ["stop"]


def test_more_sequences_than_rows_all_end(trained: Engine) -> None:
    operations = [
        sample(p, seed=i, stop=[], num_samples=3, max_tokens=3 + i) for i, p in enumerate(PROMPTS)
    ]
    expected = [sequences(result) for result in sample_all(trained, "base", operations)]
    results = sample_all(trained, "base", operations, rows=4, prefill_tokens=50)
    squeezed = [sequences(result) for result in results]
    assert squeezed == expected


def test_late_requests_join_the_running_batch(trained: Engine) -> None:
    operations = [sample(p, seed=i, stop=[], max_tokens=9) for i, p in enumerate(PROMPTS)]
    expected = [sequences(sample_all(trained, "base", [item])[0]) for item in operations]
    decoder = Decoder(trained)
    jobs = []
    for operation in operations:
        jobs.append(decoder.submit("base", operation))
        decoder.step()
        decoder.step()
    while decoder.jobs:
        decoder.step()
    assert [sequences(job.result()) for job in jobs] == expected


def test_training_between_steps_changes_no_sample(trained: Engine, datums: Make) -> None:
    operations = [sample(p, seed=i, stop=[]) for i, p in enumerate(PROMPTS)]
    expected = [sequences(result) for result in sample_all(trained, "adapted", operations)]
    decoder = Decoder(trained)
    jobs = [decoder.submit("adapted", operation) for operation in operations]
    while decoder.jobs:
        decoder.step()
        trained.execute(
            "run",
            Operation(
                kind="forward_backward", params={"loss_fn": "cross_entropy"}, arrays=datums()
            ),
        )
        trained.execute("run", Operation(kind="optim_step", params={"learning_rate": 1e-2}))
    assert [sequences(job.result()) for job in jobs] == expected


def test_a_prompt_that_fills_the_context_gets_its_one_token(trained: Engine) -> None:
    prompt = RNG.integers(3, 380, size=trained.base.context - 1)
    (result,) = sample_all(trained, "base", [sample(prompt, max_tokens=50, stop=[])])
    assert [len(row) for row in sequences(result)] == [1]
    with pytest.raises(InvalidInput, match="context"):
        sample_all(trained, "base", [sample([*prompt, 5])])


def test_samplers_come_and_go(trained: Engine) -> None:
    for _ in range(2):
        trained.execute("", Operation(kind="unload_sampler", params={"sampler_id": "adapted"}))
    with pytest.raises(NotFound, match="adapted is not loaded"):
        Decoder(trained).submit("adapted", sample([5]))
    with pytest.raises(InvalidInput, match="No adapter there"):
        trained.execute(
            "",
            Operation(kind="load_sampler", params={"sampler_id": "x", "folder": "/nonexistent"}),
        )


def test_adapters_share_a_batch_and_never_mix(
    trained: Engine, datums: Make, tmp_path: Path
) -> None:
    """Rows of three adapters and of the base, in one batch, against each alone."""
    names = ["base", "adapted"]
    for number, spec in enumerate(({"rank": 1}, {"rank": 7, "train_attn": False})):
        run = f"other{number}"
        trained.execute(run, Operation(kind="create_run", params={"seed": number, **spec}))
        for turn in range(3):
            arrays = datums(seed=50 + number + turn)
            loss = {"loss_fn": "cross_entropy"}
            trained.execute(run, Operation(kind="forward_backward", params=loss, arrays=arrays))
            step = Operation(kind="optim_step", params={"learning_rate": 2e-2})
            trained.execute(run, step)
        folder = tmp_path / run
        folder.mkdir()
        trained.execute(run, Operation(kind="save_weights", params={"folder": str(folder)}))
        load = {"sampler_id": run, "folder": str(folder)}
        trained.execute("", Operation(kind="load_sampler", params=load))
        names.append(run)
    asks = [
        (name, sample(p, seed=i, stop=[], prompt_logprobs=True, max_tokens=6 + i))
        for i, p in enumerate(PROMPTS)
        for name in names
    ]
    alone = [sample_all(trained, name, [item])[0] for name, item in asks]
    decoder = Decoder(trained, rows=20)
    jobs = [decoder.submit(name, item) for name, item in asks]
    slots = 0
    while decoder.jobs:
        decoder.step()
        slots = max(slots, len({s.job.slot for s in decoder._rows}))
        trained.adapters.use(None)  # whatever was active in between
    assert slots == 4, "the rows did not share a batch"
    for job, expected in zip(jobs, alone, strict=True):
        assert sequences(job.result()) == sequences(expected)
        for key in ("logprobs", "prompt_logprobs"):
            np.testing.assert_allclose(
                job.result().arrays[key], expected.arrays[key], atol=1e-4, err_msg=key
            )


def test_the_likeliest_of_each_sampled_token(trained: Engine) -> None:
    operations = [
        sample(p, seed=i, stop=[], top_sample=3, num_samples=2) for i, p in enumerate(PROMPTS)
    ]
    for prompt, result in zip(PROMPTS, sample_all(trained, "base", operations), strict=True):
        offsets = result.arrays["tokens.offsets"]
        for row, tokens in enumerate(sequences(result)):
            part = slice(offsets[row], offsets[row + 1])
            whole = torch.tensor([*prompt.tolist(), *tokens])
            trained.adapters.use(None)
            with torch.no_grad():
                scores = trained.base.logits(whole[None])[0].log_softmax(-1)
            best = scores[len(prompt) - 1 : -1].topk(3)
            np.testing.assert_allclose(
                result.arrays["top.logprobs"][part], best.values.numpy(), atol=2e-4
            )
            assert result.arrays["top.ids"][part].tolist() == best.indices.tolist()


def test_a_prompt_is_computed_once_for_all_its_samples(
    trained: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    plain = type(trained.base).prompt_positions

    def counted(base: Any, tokens: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        computed.append(len(tokens))
        return plain(base, tokens, *rest, **more)

    monkeypatch.setattr(type(trained.base), "prompt_positions", counted)
    many = sample(PROMPTS[3], seed=1, stop=[], num_samples=30, max_tokens=5)
    (squeezed,) = sample_all(trained, "adapted", [many], rows=4)
    assert computed == [1], "more samples than rows, and yet one prompt"
    monkeypatch.undo()
    (free,) = sample_all(trained, "adapted", [many])
    assert sequences(squeezed) == sequences(free)


def test_a_failure_is_of_those_it_befell(trained: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(trained)
    running = decoder.submit("base", sample(PROMPTS[0], seed=1, stop=[]))
    decoder.step()
    plain = type(trained.base).prompt_positions

    def broken(base: Any, *rest: Any, **more: Any) -> torch.Tensor:
        raise MemoryError("no room for this prompt")

    monkeypatch.setattr(type(trained.base), "prompt_positions", broken)
    befallen = decoder.submit("adapted", sample(PROMPTS[1], seed=1))
    assert decoder.step() == [befallen]
    monkeypatch.setattr(type(trained.base), "prompt_positions", plain)
    with pytest.raises(MemoryError):
        befallen.result()
    while decoder.jobs:
        decoder.step()
    assert len(sequences(running.result())[0]) == 12


def test_a_cancelled_job_frees_its_rows(trained: Engine) -> None:
    decoder = Decoder(trained, rows=4)
    keep = decoder.submit("base", sample(PROMPTS[0], seed=1, stop=[]))
    cancelled = decoder.submit("base", sample(PROMPTS[1], num_samples=9, stop=[]))
    decoder.step()
    decoder.cancel(cancelled)
    assert not decoder.in_use("adapted")
    assert decoder.in_use("base")
    while decoder.jobs:
        decoder.step()
    (alone,) = sample_all(trained, "base", [sample(PROMPTS[0], seed=1, stop=[])])
    assert sequences(keep.result()) == sequences(alone)


@given(seed=st.integers(0, 2**20))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_and_goes_each_gets_its_own(trained: Engine, seed: int) -> None:
    """Random arrivals, cancellations, lengths and rows, against each request alone."""
    random = np.random.default_rng(seed)
    decoder = Decoder(trained, rows=int(random.integers(1, 9)))
    asked: list[tuple[str, Operation, Job]] = []
    for _ in range(12):
        name = str(random.choice(["base", "adapted"]))
        operation = sample(
            random.integers(3, 380, size=random.integers(1, 30)),
            seed=int(random.integers(100)),
            temperature=float(random.choice([0.0, 1.0])),
            num_samples=int(random.integers(1, 4)),
            max_tokens=int(random.integers(1, 9)),
            stop=[],
        )
        asked.append((name, operation, decoder.submit(name, operation, tenant=name)))
        for _ in range(int(random.integers(3))):
            decoder.step()
        if random.random() < 0.2:
            *_, last = asked.pop()
            decoder.cancel(last)
    while decoder.jobs:
        decoder.step()
    for name, operation, job in asked:
        (alone,) = sample_all(trained, name, [operation])
        assert sequences(job.result()) == sequences(alone)
