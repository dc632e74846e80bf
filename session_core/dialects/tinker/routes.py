"""The routes of the dialect, put together, and those of start-up, training and sampling."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from registry import Caller, InvalidInput, NotFound, NotServed, SlipwayError
from session_core import operations as op
from session_core.dialects.tinker import account, bodies, downloads, futures, rest, sessions
from session_core.dialects.tinker.options import Options
from session_core.dialects.tinker.protobuf import (
    LARGEST_BODY,
    MEDIA_TYPE,
    decompress,
    parse_forward_backward,
)
from session_core.models import LoggedOperation, SessionStatus
from session_core.operations import Operation, Refused
from session_core.service import SessionService

PREFIX = "/api/v1"
# Routes whose bodies may be larger than others'.
LARGER = {f"{PREFIX}/forward_backward": LARGEST_BODY}


def router(service: SessionService, options: Options | None = None) -> APIRouter:
    """Every route of the dialect, on one service."""
    options = options or Options()
    routes = APIRouter(prefix=PREFIX)
    _start_up(routes, service, options)
    _training(routes, service)
    _weights(routes, service)
    _sampling(routes, service)
    futures.add_routes(routes, service, options)
    rest.add_routes(routes, service)
    downloads.add_routes(routes, service)
    sessions.add_routes(routes, service)
    account.add_routes(routes, service)

    @routes.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def refuse(path: str) -> Response:
        raise NotFound(f"{PREFIX}/{path} is not served here: see docs/compatibility.md")

    return routes


def submitted(row: LoggedOperation) -> dict[str, Any]:
    """The future of an operation."""
    return {"request_id": row.id, "model_id": row.run_id}


def _start_up(routes: APIRouter, service: SessionService, options: Options) -> None:
    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.post("/client/config")
    async def client_config() -> dict[str, Any]:
        return options.client_config

    @routes.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return options.dynamic_config

    @routes.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        # Accepted, so that the client is content, and dropped: nothing is collected here.
        return {"status": "accepted"}

    @routes.get("/get_server_capabilities")
    async def capabilities(caller: Caller) -> dict[str, Any]:
        quota = await to_thread(service.quotas.of, caller.tenant_id)
        context = service.context
        model = {
            "model_name": service.base.name,
            "max_context_length": context if quota.context is None else min(context, quota.context),
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    @routes.post("/create_session")
    async def create_session(caller: Caller, body: bodies.CreateSession) -> dict[str, Any]:
        session = await service.create_session(
            caller,
            user_metadata=body.user_metadata or {},
            tags=body.tags,
            sdk_version=body.sdk_version,
            display_name=body.display_name,
            project_id=body.project_id,
        )
        return {"session_id": session.id, "type": "create_session"}

    @routes.post("/session_heartbeat")
    async def heartbeat(caller: Caller, body: bodies.SessionRef) -> Response:
        status = await service.heartbeat(caller, body.session_id)
        if status is not SessionStatus.ACTIVE:
            return JSONResponse({"detail": f"the session is {status.value}"}, status_code=410)
        return JSONResponse({"type": "session_heartbeat"})


def _training(routes: APIRouter, service: SessionService) -> None:
    @routes.post("/create_model")
    async def create_model(caller: Caller, body: bodies.CreateModel) -> dict[str, Any]:
        _adam_only(body.optimizer_config)
        lora = body.lora_config or bodies.LoraConfig()
        # A run without a seed gets one here, the same in a retry and in a replay.
        seed = lora.seed if lora.seed is not None else _seed(body.session_id, body.model_seq_id)
        row = await service.create_run(
            caller,
            body.session_id,
            body.model_seq_id,
            base_model=body.base_model,
            lora={**lora.model_dump(), "seed": seed},
            user_metadata=body.user_metadata or {},
        )
        return submitted(row)

    @routes.post("/get_info")
    async def get_info(caller: Caller, body: bodies.ModelRef) -> dict[str, Any]:
        run = await to_thread(service.operations.run, caller.tenant_id, body.model_id)
        # A folder, so that the client's tokenizer is read from disk and from no hub.
        data = {"model_name": run.base_model, "tokenizer_id": str(service.base_folder)}
        return {
            "type": "get_info",
            "model_id": run.id,
            "model_data": data,
            "model_name": run.base_model,
            "optimizer_config": rest.ADAM,
            "is_lora": True,
            "lora_rank": run.lora.get("rank"),
        }

    @routes.post("/forward_backward")
    async def forward_backward(caller: Caller, request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "").split(";")[0] != MEDIA_TYPE:
            raise InvalidInput(f"forward_backward is sent as {MEDIA_TYPE}: update the tinker SDK")
        body = await request.body()
        encoding = request.headers.get("content-encoding")
        raw = await to_thread(decompress, body, encoding)
        run_id, seq, wanted = await to_thread(parse_forward_backward, raw)
        return submitted(await service.submit(caller, run_id, seq, wanted))

    @routes.post("/optim_step")
    async def optim_step(caller: Caller, body: bodies.OptimStep) -> dict[str, Any]:
        wanted = attempt(op.OPTIM_STEP, body.adam)
        return submitted(await service.submit(caller, body.model_id, _seq(body.seq_id), wanted))


def _weights(routes: APIRouter, service: SessionService) -> None:
    @routes.post("/save_weights")
    async def save_weights(caller: Caller, body: bodies.SaveWeights) -> dict[str, Any]:
        seq = _seq(body.seq_id)
        wanted = attempt(op.SAVE_CHECKPOINT, lambda: body.params(seq))
        return submitted(await service.submit(caller, body.model_id, seq, wanted))

    @routes.post("/save_weights_for_sampler")
    async def save_for_sampler(
        caller: Caller, body: bodies.SaveWeightsForSampler
    ) -> dict[str, Any]:
        wanted = attempt(op.SAVE_WEIGHTS, body.params)
        return submitted(await service.submit(caller, body.model_id, _seq(body.seq_id), wanted))

    @routes.post("/save_weights_external")
    async def save_external(caller: Caller, body: bodies.SaveWeightsExternal) -> dict[str, Any]:
        wanted = attempt(op.SAVE_WEIGHTS, body.params)
        return submitted(await service.submit(caller, body.model_id, _seq(body.seq_id), wanted))

    @routes.post("/load_weights")
    async def load_weights(caller: Caller, body: bodies.LoadWeights) -> dict[str, Any]:
        def check() -> dict[str, Any]:
            rest.refuse_token(body.weights_access_token)
            if body.optimizer_config is not None:
                _adam_only(body.optimizer_config)
            if body.base_model is not None:
                service.base.check(body.base_model)
            return {}

        if body.model_id is not None:
            wanted = attempt(op.LOAD_RUN, check)
            if isinstance(wanted, Refused):
                seq = _seq(body.seq_id)
                return submitted(await service.submit(caller, body.model_id, seq, wanted))
            row = await service.load_into(
                caller,
                body.model_id,
                _seq(body.seq_id),
                path=body.path,
                optimizer=body.optimizer,
            )
            return submitted(row)
        check()
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidInput("load_weights needs a model_id, or a session_id and model_seq_id")
        row = await service.load_run(
            caller,
            body.session_id,
            body.model_seq_id,
            path=body.path,
            optimizer=body.optimizer,
            user_metadata=body.user_metadata or {},
        )
        return submitted(row)


def _sampling(routes: APIRouter, service: SessionService) -> None:
    @routes.post("/create_sampling_session")
    async def create_sampling_session(
        caller: Caller, body: bodies.CreateSamplingSession
    ) -> dict[str, Any]:
        sampler = await service.create_sampler(
            caller,
            body.session_id,
            body.sampling_session_seq_id,
            base_model=body.base_model,
            model_path=body.model_path,
        )
        return {"sampling_session_id": sampler.id, "type": "create_sampling_session"}

    @routes.post("/join_sampling_session")
    async def join_sampling_session(
        caller: Caller, body: bodies.JoinSamplingSession
    ) -> dict[str, Any]:
        number = await service.join_sampler(caller, body.sampling_session_id)
        return {"client_counter": number, "type": "join_sampling_session"}

    @routes.post("/create_custom_loss")
    async def create_custom_loss(caller: Caller) -> None:
        del caller
        raise NotServed(
            "create_custom_loss is not served: forward_backward_custom computes the loss on the "
            "client, as the SDK does by itself with this server"
        )

    @routes.get("/samplers/{sampler_id}")
    async def show_sampler(caller: Caller, sampler_id: str) -> dict[str, Any]:
        sampler = await to_thread(service.operations.sampler, caller.tenant_id, sampler_id)
        return {
            "sampler_id": sampler.id,
            "base_model": sampler.base_model,
            "model_path": sampler.model_path,
        }

    @routes.post("/asample")
    async def asample(caller: Caller, body: bodies.Sample) -> dict[str, Any]:
        more = {}
        if body.target_prompt_logprobs is not None:
            more = body.target_prompt_logprobs.arrays("prompt_targets")
        operation = futures.sample_operation(body.prompt.tokens(), body.params(), more)
        assert body.sampling_session_id is not None
        sample = await service.sample(caller, body.sampling_session_id, operation, seq=body.seq_id)
        ids = [f"{sample.id}:{number}" for number in range(sample.num_samples)]
        return {"request_id": sample.id, "sample_sequence_ids": ids}


def attempt(kind: str, params: Callable[[], dict[str, Any]]) -> Operation | Refused:
    """An operation; or, where its parameters are wrong, one that fails when its turn comes.

    The client has numbered it already: were it turned away, what follows would wait for it.
    """
    try:
        return Operation(kind=kind, params=params())
    except SlipwayError as error:
        return Refused(kind=kind, message=error.message)


def _seed(session_id: str, number: int) -> int:
    """A run's seed, for a client that gave none: 31 bits of its id."""
    return int.from_bytes(sha256(f"{session_id}:{number}".encode()).digest()[:4]) >> 1


def _seq(seq: int | None) -> int:
    if seq is None:
        raise InvalidInput("seq_id is missing: operations of a run are numbered from 1")
    return seq


def _adam_only(config: bodies.OptimizerConfig) -> None:
    if config.type != "adamw":
        raise InvalidInput(f"optimizer {config.type!r} is not served here: use adamw")
