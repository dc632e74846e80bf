"""A live session through the gateway, as its users reach it."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
import tinker


@pytest.fixture
def saved(running: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of an adapter saved in a session of the running server."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    known = running.json("env")
    service = tinker.ServiceClient(
        base_url=known["TINKER_BASE_URL"], api_key=known["TINKER_API_KEY"]
    )
    client = service.create_lora_training_client("org/tiny", rank=2).result()
    return str(client.save_weights_for_sampler("one").result().path)


def connect(running: Any) -> openai.OpenAI:
    known = running.json("env")
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{running.gateway_port}/v1",
        api_key=known["TINKER_API_KEY"],
        max_retries=0,
    )


def test_a_live_session_answers_through_the_gateway(running: Any, saved: str) -> None:
    with connect(running) as ai:
        raw = ai.completions.with_raw_response.create(
            model=saved, prompt="one", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
        )
        answer = raw.parse()
        assert raw.headers["x-slipway-version"].startswith("default/")
        assert raw.headers["x-slipway-digest"].startswith("sha256:")
        assert answer.model == saved
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        # The stand-in for vLLM says something else: it was the session that answered.
        assert "the answer 7" not in answer.choices[0].text
        chunks = ai.completions.create(
            model=saved,
            prompt="one",
            max_tokens=6,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_its_errors_have_openais_shape(running: Any, saved: str) -> None:
    with connect(running) as ai:
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            ai.chat.completions.create(model=saved, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="presence_penalty") as caught:
            ai.completions.create(model=saved, prompt="x", presence_penalty=1)
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError):
            ai.completions.create(model=saved.replace("/one", "/two"), prompt="x")
        with pytest.raises(openai.BadRequestError):
            ai.completions.create(model=saved, prompt="x", stream=True, top_p=0)


def test_it_is_unavailable_while_the_control_plane_is_gone(up: Any) -> None:
    up.start()
    up.wait_ready()
    known = up.json("env")
    assert up.process is not None
    family = up.family()
    up.process.kill()
    up.process.wait()
    try:
        with connect_to(up, known["TINKER_API_KEY"]) as ai:
            deadline = time.monotonic() + 20
            while True:
                with pytest.raises(openai.APIStatusError) as caught:
                    ai.completions.create(model="a:sample:0", prompt="x")
                if caught.value.status_code == 503 or time.monotonic() > deadline:
                    break
            assert caught.value.status_code == 503
            assert caught.value.code == "session_unavailable"
            assert caught.value.response.headers["retry-after"] == "2"
    finally:
        for process in family:
            if process.is_running():
                process.kill()


def connect_to(up: Any, key: str) -> openai.OpenAI:
    url = f"http://127.0.0.1:{up.gateway_port}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)
