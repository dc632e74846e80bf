from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from evals.suites import Decoding
from evals.targets import Codec, CompletionsTarget, TargetError
from registry.errors import InvalidInput

DECODING = Decoding(max_tokens=16, stop=["<|im_end|>"])


def with_target(url, codec, work, **options):
    async def main():
        async with httpx.AsyncClient(trust_env=False, timeout=options.get("timeout", 20)) as client:
            target = CompletionsTarget(base_url=url, model="sums/1", codec=codec, client=client)
            return await work(target)

    return asyncio.run(main())


@pytest.fixture
def prompt(codec, suite) -> list[int]:
    return codec.encode(suite.render(suite.items[1]))


def test_the_codec_keeps_special_tokens_and_adds_none(codec):
    ids = codec.encode("<|im_start|>user\n12<|im_end|>")
    assert (ids[0], ids[-1]) == (0, 1)
    assert codec.decode(ids) == "user\n12"
    assert codec.encode("") == []


def test_the_codec_ignores_truncation_of_the_file(tokenizer_json, tmp_path):
    from tokenizers import Tokenizer

    cutting = Tokenizer.from_str(tokenizer_json)
    cutting.enable_truncation(3)
    cutting.enable_padding(length=64)
    path = tmp_path / "tokenizer.json"
    path.write_text(cutting.to_str())
    text = "a longer text than that"
    assert Codec(path).decode(Codec(path).encode(text)) == text


@pytest.mark.parametrize(
    ("data", "telling"), [(None, "merge it first"), ("{", "cannot be read"), ("{}", "cannot be")]
)
def test_a_bad_tokenizer_file_is_explained(tmp_path, data, telling):
    path = tmp_path / "tokenizer.json"
    if data is not None:
        path.write_text(data)
    with pytest.raises(InvalidInput, match=telling):
        Codec(path)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_generate_sends_token_ids_and_greedy_decoding(stand_in, codec, prompt, suffix):
    found = with_target(stand_in.url + suffix, codec, lambda t: t.generate(prompt, DECODING))
    assert (found.text, found.finish_reason) == ("12", "stop")
    assert list(found.token_ids) == codec.encode("12")
    sent = stand_in.requests[0]
    assert sent["prompt"] == prompt
    assert sent["model"] == "sums/1"
    assert (sent["temperature"], sent["max_tokens"], sent["stop"]) == (0, 16, ["<|im_end|>"])
    assert sent["repetition_penalty"] == 1.0


def test_generate_without_token_ids_counts_by_the_tokenizer(stand_in, codec, prompt):
    reply = {"choices": [{"text": "12", "finish_reason": "stop"}]}
    stand_in.fault = lambda question, attempt: JSONResponse(reply)
    found = with_target(stand_in.url, codec, lambda t: t.generate(prompt, DECODING))
    assert list(found.token_ids) == codec.encode("12")


def test_text_that_cannot_be_stored_is_made_so(stand_in, codec, prompt):
    stand_in.answer = lambda model, question: "12"
    reply = b'{"choices": [{"text": "\\ud800 12", "token_ids": [5], "finish_reason": "stop"}]}'
    stand_in.fault = lambda question, attempt: Response(reply)
    found = with_target(stand_in.url, codec, lambda t: t.generate(prompt, DECODING))
    assert found.text == "? 12"


def test_logprobs_are_those_of_the_prompt(stand_in, codec, prompt):
    stand_in.score = lambda model, ids: [None, *[-0.125 * i for i in range(1, len(ids))]]
    found = with_target(stand_in.url, codec, lambda t: t.logprobs(prompt))
    assert found == [None, *[-0.125 * i for i in range(1, len(prompt))]]
    sent = stand_in.requests[0]
    assert (sent["echo"], sent["logprobs"], sent["max_tokens"]) == (True, 1, 1)


@pytest.mark.parametrize(
    ("scores", "telling"),
    [
        (lambda model, ids: [], "does not return the prompt's logprobs"),
        (lambda model, ids: [None] * len(ids), "left out logprobs"),
    ],
)
def test_missing_logprobs_are_an_error(stand_in, codec, prompt, scores, telling):
    stand_in.score = scores
    with pytest.raises(TargetError, match=telling) as caught:
        with_target(stand_in.url, codec, lambda t: t.logprobs(prompt))
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("response", "retryable"),
    [
        (Response("boom", status_code=500), True),
        (Response("later", status_code=503), True),
        (Response("slow down", status_code=429), True),
        (JSONResponse({"error": "prompt is too long"}, status_code=400), False),
        (Response("none here", status_code=404), False),
        (Response("<html>garbage", media_type="application/json"), True),
        (Response(b"\xff\xfe"), True),
        (JSONResponse({}), True),
        (JSONResponse({"choices": []}), True),
        (JSONResponse({"choices": ["text"]}), True),
        (JSONResponse(["choices"]), True),
        (JSONResponse({"choices": [{"text": None, "finish_reason": "stop"}]}), True),
        (JSONResponse({"choices": [{"text": "12"}]}), True),
        (JSONResponse({"choices": [{"text": "1", "finish_reason": "abort"}]}), True),
    ],
)
def test_a_bad_response_is_a_target_error(stand_in, codec, prompt, response, retryable):
    stand_in.fault = lambda question, attempt: response
    with pytest.raises(TargetError) as caught:
        with_target(stand_in.url, codec, lambda t: t.generate(prompt, DECODING))
    assert caught.value.retryable is retryable


def test_a_dead_or_slow_server_is_a_target_error(stand_in, codec, prompt):
    with pytest.raises(TargetError, match="no answer: ConnectError"):
        with_target("http://127.0.0.1:1", codec, lambda t: t.generate(prompt, DECODING))
    stand_in.delay = lambda question: 0.5
    with pytest.raises(TargetError, match="no answer: ReadTimeout"):
        with_target(stand_in.url, codec, lambda t: t.generate(prompt, DECODING), timeout=0.05)
