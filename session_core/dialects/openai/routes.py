"""The routes the gateway forwards to: chat and completions on what a session has saved."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from registry import Caller, InvalidInput, Principal, SlipwayError
from session_core import operations as op
from session_core.dialects.openai.answers import Answer, Choice, usage_of
from session_core.dialects.openai.bodies import ChatBody, CompletionBody
from session_core.dialects.openai.merging import merged
from session_core.dialects.openai.pieces import Piece, Pieces, Scored
from session_core.live import LiveModel
from session_core.operations import Operation
from session_core.requests import MAX_SAMPLES
from session_core.responses import GeneratedResponse
from session_core.service import SessionService

PREFIX = "/slipway/v1/live"
Line = tuple[int, dict[str, Any]]
"""A prompt's number, and a line of the engine's, see `session_core.streaming`."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, understood."""

    body: ChatBody | CompletionBody
    model: LiveModel
    prompts: list[list[int]]
    answer: Answer

    @property
    def echo(self) -> bool:
        """Whether the answer begins with the prompt."""
        return isinstance(self.body, CompletionBody) and self.body.echo

    @property
    def nothing_new(self) -> bool:
        """Whether the prompt alone is wanted."""
        return isinstance(self.body, CompletionBody) and not self.body.max_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)


def router(service: SessionService) -> APIRouter:
    """Both routes, on one service."""
    routes = APIRouter(prefix=PREFIX)

    @routes.post("/chat/completions")
    async def chat(caller: Caller, body: ChatBody) -> Response:
        model = await _find(service, caller, body.model)
        prompts = [await service.live.tokens(body.chat())]
        return await _respond(service, caller, _asked(service, body, model, prompts))

    @routes.post("/completions")
    async def completions(caller: Caller, body: CompletionBody) -> Response:
        model = await _find(service, caller, body.model)
        prompts = [
            await service.live.tokens({"text": prompt}) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        return await _respond(service, caller, _asked(service, body, model, prompts))

    return routes


async def _find(service: SessionService, caller: Principal, model: str) -> LiveModel:
    return await service.live.find(caller, model, now=service.registry.clock())


def _asked(
    service: SessionService,
    body: ChatBody | CompletionBody,
    model: LiveModel,
    prompts: list[list[int]],
) -> Asked:
    if body.n * len(prompts) > MAX_SAMPLES:
        raise InvalidInput(
            f"{len(prompts)} prompts of {body.n} answers each are {body.n * len(prompts)} answers: "
            f"at most {MAX_SAMPLES} are given at once"
        )
    largest = np.iinfo(np.int32).max
    if any(not 0 <= token <= largest for prompt in prompts for token in prompt):
        raise InvalidInput("the prompt holds token ids that no vocabulary holds")
    chat = isinstance(body, ChatBody)
    scored = body.logprobs if isinstance(body, ChatBody) else body.logprobs is not None
    answer = Answer(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{service.registry.new_id()}",
        created=int(service.registry.clock().timestamp()),
        model=model.name,
        chat=chat,
        logprobs=scored,
        token_ids=body.return_token_ids,
    )
    return Asked(body=body, model=model, prompts=prompts, answer=answer)


async def _respond(service: SessionService, caller: Principal, asked: Asked) -> Response:
    headers = {"x-slipway-version": asked.model.reference}
    if asked.model.version is not None:
        headers["x-slipway-digest"] = asked.model.version.digest
    lines = merged(
        [
            service.live.stream(asked.model, operation, caller=caller)
            for operation in _operations(asked)
        ]
    )
    if not asked.body.stream:
        return JSONResponse(await _whole(asked, lines), headers=headers)
    # What is wrong with a request shows with its first token, while the status can still tell.
    try:
        first = await anext(lines)
    except BaseException:
        await lines.aclose()
        raise
    return GeneratedResponse(
        _events(asked, first, lines), media_type="text/event-stream", headers=headers
    )


def _operations(asked: Asked) -> list[Operation]:
    params = asked.body.params()
    return [
        Operation(
            kind=op.SAMPLE, params=params, arrays={"tokens": np.array(prompt, dtype=np.int32)}
        )
        for prompt in asked.prompts
    ]


def _pieces(asked: Asked) -> list[Pieces]:
    stops, n = asked.body.stops(), asked.body.n
    return [Pieces(first=number * n, stops=stops) for number in range(len(asked.prompts))]


async def _whole(asked: Asked, lines: AsyncGenerator[Line, None]) -> dict[str, Any]:
    n = asked.body.n
    choices = [Choice(index=index) for index in range(n * len(asked.prompts))]
    pieces = _pieces(asked)
    async with aclosing(lines):
        async for number, line in lines:
            if "token" in line:
                piece = pieces[number].of(line)
                choices[piece.choice].add(piece)
            elif asked.echo:
                _echo(choices[number * n : (number + 1) * n], line["prompt"])
    if asked.nothing_new:
        for choice in choices:
            choice.clear()
    sampled = sum(len(choice.scored) for choice in choices)
    return asked.answer.whole(choices, usage_of(asked.prompt_tokens, sampled))


def _echo(choices: Sequence[Choice], prompt: dict[str, Any]) -> None:
    for choice in choices:
        choice.prompt_text = prompt["text"]
        choice.prompt = [Scored.of(line) for line in prompt["tokens"]]


async def _events(
    asked: Asked,
    first: Line,
    rest: AsyncGenerator[Line, None],
) -> AsyncGenerator[str, None]:
    """Server-sent events: one a token, then the counts if asked for, then the end."""
    pieces, offsets, sampled = _pieces(asked), dict[int, int](), 0
    try:
        async with aclosing(rest):
            async for number, line in _again(first, rest):
                if "token" not in line:
                    continue
                piece = pieces[number].of(line)
                if asked.answer.chat and piece.choice not in offsets:
                    yield _event(asked.answer.opening(piece.choice))
                offset = offsets.get(piece.choice, 0)
                offsets[piece.choice] = offset + len(piece.scored.text)
                sampled += 1
                if _tells(asked, piece):
                    yield _event(asked.answer.chunk(piece, offset=offset))
    except SlipwayError as error:
        # The status is out already; OpenAI's clients raise what an event names so.
        yield _event({"error": {"message": error.message, "code": error.code}})
        return
    if asked.body.wants_usage:
        yield _event(asked.answer.closing(usage_of(asked.prompt_tokens, sampled)))
    yield "data: [DONE]\n\n"


def _tells(asked: Asked, piece: Piece) -> bool:
    """Whether a piece has anything to say: half a character, say, has not."""
    answer = asked.answer
    return bool(piece.text or piece.finish_reason or answer.logprobs or answer.token_ids)


async def _again(first: Line, rest: AsyncGenerator[Line, None]) -> AsyncIterator[Line]:
    yield first
    async for item in rest:
        yield item


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
