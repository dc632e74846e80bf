"""Results: one long poll a request, in the shape its kind has on the wire."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from registry import Caller, InvalidInput, NotFound, NotServed
from session_core import operations as op
from session_core.dialects.tinker import bodies
from session_core.dialects.tinker.options import Options
from session_core.dialects.tinker.protobuf import (
    MEDIA_TYPE,
    forward_backward_output,
    sample_response,
)
from session_core.operations import Array, Operation, Result
from session_core.results import Outcome, Queue
from session_core.service import SessionService

# What the wire can carry as a token id.
TOKEN_BOUNDS = np.iinfo(np.int32)

QUEUE_STATES = {Queue.ACTIVE: "active", Queue.PAUSED: "paused_capacity"}
TRAINING = frozenset({op.FORWARD, op.FORWARD_BACKWARD})


def sample_operation(
    tokens: list[int], params: dict[str, Any], more: Mapping[str, Array] | None = None
) -> Operation:
    """A sample operation. Raises: InvalidInput: for token ids that no vocabulary holds."""
    if any(not 0 <= token <= TOKEN_BOUNDS.max for token in tokens):
        raise InvalidInput("the prompt holds token ids that no vocabulary holds")
    arrays = {"tokens": np.array(tokens, np.int32), **(more or {})}
    return Operation(kind=op.SAMPLE, params=params, arrays=arrays)


def add_routes(routes: APIRouter, service: SessionService, options: Options) -> None:
    """The routes that poll for results, and give them up."""

    @routes.post("/retrieve_future")
    async def retrieve_future(caller: Caller, body: bodies.RetrieveFuture) -> Response:
        try:
            outcome = await service.results.of(
                caller, body.request_id, seconds=options.poll_seconds
            )
        except NotFound as error:
            # 410 says the promise is lost: a sample is then submitted again by the client.
            return JSONResponse({"detail": error.message}, status_code=410)
        if outcome.state == "waiting":
            return JSONResponse(
                {
                    "type": "try_again",
                    "request_id": body.request_id,
                    "queue_state": QUEUE_STATES[outcome.queue],
                    "queue_state_reason": outcome.message,
                }
            )
        if outcome.state == "failed":
            return JSONResponse({"error": outcome.message, "category": outcome.category})
        response = await to_thread(answer, outcome)
        if body.allow_metadata_only and len(response.body) > options.inline_bytes:
            size = len(response.body)
            return JSONResponse({"status": "complete_metadata", "response_payload_size": size})
        return response

    @routes.post("/cancel_future", status_code=204)
    async def cancel_future(caller: Caller, body: bodies.RequestRef) -> None:
        await service.results.cancel(caller, body.request_id)

    @routes.post("/retrieve_futures")
    async def retrieve_futures(caller: Caller) -> None:
        del caller
        raise NotServed(
            "retrieve_futures is not served: a client that polls so cannot be told that a sample "
            "was lost in a restart; leave sample_use_retrieve_futures off, as client/config does"
        )


def answer(outcome: Outcome) -> Response:
    """A result in the shape of its kind."""
    result = outcome.result
    assert result is not None
    if outcome.kind in TRAINING:
        return Response(forward_backward_output(result), media_type=MEDIA_TYPE)
    if outcome.kind == op.SAMPLE:
        return Response(sample_response(result), media_type=MEDIA_TYPE)
    return JSONResponse(json_result(outcome.kind, result))


def json_result(kind: str, result: Result) -> dict[str, Any]:
    """The results that are JSON on the wire."""
    params = dict(result.params)
    if kind == op.OPTIM_STEP:
        return {"metrics": params["metrics"], "type": "optim_step"}
    if kind == op.SAVE_CHECKPOINT:
        return {"path": params["path"], "type": "save_weights"}
    if kind == op.SAVE_WEIGHTS and params.get("external"):
        known = {key: params[key] for key in ("path", "size_bytes")}
        return {**known, "type": "save_weights_external"}
    if kind == op.SAVE_WEIGHTS:
        known = {key: params.get(key) for key in ("path", "sampling_session_id")}
        named = {key: value for key, value in known.items() if value is not None}
        return {**named, "type": "save_weights_for_sampler"}
    kinds = {op.CREATE_RUN: "create_model", op.LOAD_RUN: "load_weights"}
    return {"model_id": params["model_id"], "path": params.get("path"), "type": kinds[kind]}
