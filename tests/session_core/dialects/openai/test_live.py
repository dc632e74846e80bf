"""The official OpenAI client on what a live session has saved."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from sqlmodel import select
from tinker import types

from registry.models import UsageRecord

MESSAGES: list[Any] = [{"role": "user", "content": "what is one plus two?"}]


def trained(server: Any) -> tuple[Any, Any]:
    """A run with one step behind it, and its client."""
    client = server.client().create_lora_training_client("org/tiny", rank=4, seed=1).result()
    step(client)
    return client, client.get_tokenizer()


def step(client: Any) -> None:
    tokens = list(range(20, 40))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "weights": np.ones(len(tokens) - 1, np.float32),
        },
    )
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.05)).result()


def sampler_of(client: Any) -> str:
    """The id of a sampler on the run as it is now."""
    sampler = client.save_weights_and_get_sampling_client().result()
    return str(sampler._sampling_session_id)


def connect(server: Any, key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/slipway/v1/live", api_key=key or server.key, max_retries=0
    )


def test_the_same_tokens_as_the_tinker_sdk_by_path_and_by_sampler(server: Any) -> None:
    client, tokenizer = trained(server)
    path = client.save_weights_for_sampler("one").result().path
    sampler = client.create_sampling_client(path).result()
    prompt = tokenizer.encode("what is one")
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    expected = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()
    names = [path, sampler_of(client)]
    with connect(server) as ai:
        for name in names:
            raw = ai.completions.with_raw_response.create(
                model=name,
                prompt=prompt,
                max_tokens=8,
                temperature=0,
                logprobs=2,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            answer = raw.parse()
            (choice,) = answer.choices
            assert answer.model == name
            (sequence,) = expected.sequences
            assert choice.token_ids == list(sequence.tokens)  # type: ignore[attr-defined]
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == pytest.approx(sequence.logprobs, abs=1e-5)
            assert choice.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            assert choice.finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(prompt)
            assert answer.usage.completion_tokens == 8
            assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs or [])
            version = raw.headers["x-slipway-version"]
            assert version == ("default/1" if name == path else name)
        assert raw.headers.get("x-slipway-digest") is None
        # The base answers otherwise: it is the adapter that was asked.
        base = server.client().create_sampling_client(base_model="org/tiny").result()
        other = base.sample(types.ModelInput.from_ints(prompt), 1, params).result()
        assert list(other.sequences[0].tokens) != list(sequence.tokens)


def test_chats_are_rendered_by_the_models_template_and_streamed(server: Any) -> None:
    client, tokenizer = trained(server)
    path = client.save_weights_for_sampler("one").result().path
    prompt = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    options: dict[str, Any] = {
        "model": path,
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0.7,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    with connect(server) as ai:
        whole = ai.chat.completions.create(**options)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(prompt)
        texts, tokens, reasons, chunks = ["", ""], [[], []], [None, None], 0
        usage = None
        stream = ai.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            chunks += 1
            if not chunk.choices:
                usage = chunk.usage
                continue
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += getattr(choice, "token_ids", None) or []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert chunks > 10
        assert usage == whole.usage
        for choice in whole.choices:
            assert texts[choice.index] == choice.message.content
            assert tokens[choice.index] == choice.token_ids  # type: ignore[attr-defined]
            assert reasons[choice.index] == choice.finish_reason
            assert choice.logprobs is not None
            scores = choice.logprobs.content or []
            assert [score.token for score in scores] == [
                tokenizer.decode([t]) for t in tokens[choice.index]
            ]
            assert all(len(score.top_logprobs) == 2 for score in scores)


def test_several_prompts_and_an_echo(server: Any) -> None:
    client, tokenizer = trained(server)
    path = client.save_weights_for_sampler("one").result().path
    prompts = ["what is one plus two?", "the answer"]
    with connect(server) as ai:
        answer = ai.completions.create(
            model=path, prompt=prompts, max_tokens=0, echo=True, logprobs=1, n=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for choice in answer.choices:
            prompt = prompts[choice.index // 2]
            ids = tokenizer.encode(prompt)
            assert choice.text == prompt
            sampler = client.create_sampling_client(path).result()
            scores = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            assert choice.logprobs.token_logprobs[0] is None
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores[1:], abs=1e-4)
            assert choice.logprobs.tokens == [tokenizer.decode([t]) for t in ids]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0


def test_stop_texts_end_an_answer_and_are_no_part_of_it(server: Any) -> None:
    client, _ = trained(server)
    path = client.save_weights_for_sampler("one").result().path
    options: dict[str, Any] = {"model": path, "prompt": "what", "temperature": 0, "max_tokens": 24}
    free = {**options, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    with connect(server) as ai:
        choice = ai.completions.create(**free).choices[0]
        whole, tokens = choice.text, choice.token_ids  # type: ignore[attr-defined]
        assert len(whole) > 8
        stop = whole[5:8]
        cut = ai.completions.create(**free, stop=[stop])
        assert cut.choices[0].text == whole[: whole.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
        streamed = "".join(
            chunk.choices[0].text for chunk in ai.completions.create(**free, stop=stop, stream=True)
        )
        assert streamed == cut.choices[0].text
        body = {**free["extra_body"], "stop_token_ids": [tokens[6]]}
        (short,) = ai.completions.create(**options, extra_body=body).choices
        assert short.token_ids == tokens[: tokens.index(tokens[6]) + 1]  # type: ignore[attr-defined]
        assert short.finish_reason == "stop"


def test_mistakes_are_named_and_strangers_see_nothing(server: Any) -> None:
    client, _ = trained(server)
    path = client.save_weights_for_sampler("one").result().path
    sampler = sampler_of(client)
    with connect(server) as ai, connect(server, server.key_of_a_stranger()) as stranger:
        for name in (path, sampler):
            with pytest.raises(openai.NotFoundError):
                stranger.completions.create(model=name, prompt="x")
        with pytest.raises(openai.NotFoundError):
            ai.completions.create(model="nothing:sample:0", prompt="x")
        with pytest.raises(openai.BadRequestError, match="is no path"):
            ai.completions.create(model="tinker://nothing", prompt="x")
        for options, fault in (
            ({"prompt": [400]}, "outside the vocabulary"),
            ({"prompt": [-1]}, "no vocabulary holds"),
            ({"prompt": []}, "0 prompts"),
            ({"prompt": "x " * 500}, "the context of"),
            ({"prompt": "x", "presence_penalty": 1}, "presence_penalty"),
        ):
            for stream in (False, True):
                with pytest.raises(openai.APIStatusError, match=fault) as caught:
                    ai.completions.create(model=path, stream=stream, **options)  # type: ignore[call-overload]
                assert caught.value.status_code in (400, 422)
        with pytest.raises(openai.APIStatusError, match="chat_template_kwargs"):
            ai.chat.completions.create(
                model=path, messages=MESSAGES, extra_body={"chat_template_kwargs": {"messages": 1}}
            )


def test_it_is_metered_and_giving_up_stops_the_engine(server: Any) -> None:
    client, _ = trained(server)
    path = client.save_weights_for_sampler("one").result().path
    with connect(server) as ai:
        endless = {"ignore_eos": True}
        answer = ai.completions.create(
            model=path, prompt="what is", max_tokens=2, n=3, extra_body=endless
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        stream = ai.completions.create(
            model=path, prompt="what", max_tokens=200, stream=True, extra_body=endless
        )
        for number, _ in enumerate(stream):
            if number == 3:
                stream.close()
                break

    def sampled() -> list[int]:
        with server.registry.db.read() as session:
            rows = session.exec(select(UsageRecord)).all()
        return [row.tokens for row in rows if row.kind == "sample"]

    server.wait_until(lambda: len(sampled()) == 2, seconds=30)
    whole, given_up = sampled()
    assert whole == 6
    assert 3 < given_up < 200


def test_answers_come_while_training_goes_on(server: Any) -> None:
    client, _ = trained(server)
    path = client.save_weights_for_sampler("one").result().path

    async def story() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/slipway/v1/live", api_key=server.key
        ) as ai:
            asked = [
                ai.completions.create(model=path, prompt=f"one {n}", max_tokens=8, temperature=0)
                for n in range(16)
            ]
            steps = asyncio.create_task(asyncio.to_thread(step, client))
            answers = await asyncio.gather(*asked)
            await steps
            return [answer.choices[0].text for answer in answers]

    together = asyncio.run(story())
    with connect(server) as ai:
        for n, text in enumerate(together):
            alone = ai.completions.create(
                model=path, prompt=f"one {n}", max_tokens=8, temperature=0
            )
            assert alone.choices[0].text == text


def test_an_engine_that_dies_in_a_stream_is_told_in_the_stream(server: Any) -> None:
    client, _ = trained(server)
    path = client.save_weights_for_sampler("one").result().path
    body = {"model": path, "prompt": "what", "max_tokens": 240, "stream": True, "ignore_eos": True}
    url = f"{server.url}/slipway/v1/live/completions"
    with (
        httpx.Client(headers=server.headers, timeout=60) as http,
        http.stream("POST", url, json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.kill_engine()
        said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert said[-1]["error"]["code"] == "worker_died"
    step(client)  # The session goes on.
