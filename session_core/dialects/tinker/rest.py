"""The SDK's REST client: runs, and the checkpoints saved from them."""

from __future__ import annotations

from asyncio import to_thread
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query

from registry import Caller, InvalidInput, NotServed
from session_core.copies import Copies
from session_core.dialects.tinker import bodies
from session_core.listing import ListedRun
from session_core.paths import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS, TinkerPath
from session_core.saved import Saved
from session_core.service import SessionService

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=bodies.LARGEST_COUNT)]
Project = Annotated[str | None, Query(max_length=bodies.LONGEST)]

TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler", EXTERNAL_WEIGHTS: "external"}
ADAM = {"type": "adamw"}
LORA_FLAGS = ("train_unembed", "train_mlp", "train_attn")


def checkpoint(saved: Saved) -> dict[str, Any]:
    """What a path names, as the wire has it."""
    return {
        "checkpoint_id": saved.path.split("/", 3)[3],
        "checkpoint_type": TYPES[saved.kind],
        "time": saved.created_at.isoformat(),
        "tinker_path": saved.path,
        "size_bytes": saved.size_bytes,
        "public": False,
        "user_metadata": texts(saved.user_metadata),
        "expires_at": saved.expires_at and saved.expires_at.isoformat(),
    }


def texts(metadata: Any) -> dict[str, str]:
    """Metadata whose values are texts, as the wire has them."""
    return {key: str(value) for key, value in metadata.items()}


def page(limit: int, offset: int, total: int) -> dict[str, int]:
    """Where a page is in the whole."""
    return {"offset": offset, "limit": limit, "total_count": total}


def add_routes(routes: APIRouter, service: SessionService) -> None:
    """Routes of runs, of checkpoints, and of what a path names."""
    _runs(routes, service)
    _checkpoints(routes, service)
    _weights(routes, service)


def _runs(routes: APIRouter, service: SessionService) -> None:
    paths, listing = service.saver.paths, service.listing

    def described(listed: ListedRun, newest: dict[tuple[str, str], Saved]) -> dict[str, Any]:
        run = listed.run
        last = {kind: newest.get((run.id, kind)) for kind in (WEIGHTS, SAMPLER_WEIGHTS)}
        shown = {kind: saved and checkpoint(saved) for kind, saved in last.items()}
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": run.tenant_id,
            "is_lora": True,
            "corrupted": run.corrupted is not None,
            "lora_rank": run.lora.get("rank"),
            "last_request_time": listed.last_request.isoformat(),
            "last_checkpoint": shown[WEIGHTS],
            "last_sampler_checkpoint": shown[SAMPLER_WEIGHTS],
            "user_metadata": texts(run.user_metadata),
        }

    @routes.get("/training_runs")
    def list_runs(
        caller: Caller, limit: Limit = 20, offset: Offset = 0, project_id: Project = None
    ) -> dict[str, Any]:
        rows, total = listing.runs(
            caller.tenant_id, limit=limit, offset=offset, project_id=project_id
        )
        newest = paths.newest([row.run.id for row in rows])
        shown = [described(row, newest) for row in rows]
        return {"training_runs": shown, "cursor": page(limit, offset, total)}

    @routes.get("/training_runs/{run_id}")
    def show_run(caller: Caller, run_id: str) -> dict[str, Any]:
        run = service.operations.run(caller.tenant_id, run_id)
        return described(listing.run(run), paths.newest([run.id]))

    @routes.get("/training_runs/{run_id}/checkpoints")
    def run_checkpoints(caller: Caller, run_id: str) -> dict[str, Any]:
        run = service.operations.run(caller.tenant_id, run_id)
        return {"checkpoints": [checkpoint(row) for row in paths.of_run(run.tenant_id, run.id)]}

    @routes.get("/checkpoints")
    def list_checkpoints(caller: Caller, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        rows, total = paths.page(caller.tenant_id, limit=limit, offset=offset)
        shown = [checkpoint(row) for row in rows]
        return {"checkpoints": shown, "cursor": page(limit, offset, total)}


def _checkpoints(routes: APIRouter, service: SessionService) -> None:
    paths = service.saver.paths
    one = "/training_runs/{run_id}/checkpoints/{kind}/{name}"

    def path_of(run_id: str, kind: str, name: str) -> str:
        return str(TinkerPath(run_id=run_id, kind=kind, name=name))

    @routes.delete(one, status_code=204)
    def delete_checkpoint(caller: Caller, run_id: str, kind: str, name: str) -> None:
        folder = paths.remove(caller.tenant_id, path_of(run_id, kind, name))
        if folder is not None:
            service.saver.exports.drop(folder)

    @routes.put(one + "/ttl", status_code=204)
    def set_ttl(caller: Caller, run_id: str, kind: str, name: str, body: bodies.SetTtl) -> None:
        paths.set_ttl(caller.tenant_id, path_of(run_id, kind, name), body.ttl_seconds)

    @routes.post(one + "/publish")
    @routes.delete(one + "/publish")
    def publish(caller: Caller, run_id: str, kind: str, name: str) -> None:
        saved = paths.get(caller.tenant_id, path_of(run_id, kind, name))
        raise NotServed(
            f"{saved.path} cannot be published or made private: here a tenant's checkpoints are "
            "its own and no other's. To hand one on, export it with save_weights_external"
        )


def _weights(routes: APIRouter, service: SessionService) -> None:
    saver, registry = service.saver, service.registry
    copies = Copies(registry.db, registry.clock)

    @routes.post("/weights_info")
    def weights_info(caller: Caller, body: bodies.WeightsInfo) -> dict[str, Any]:
        saved = saver.paths.get(caller.tenant_id, body.tinker_path)
        run = service.operations.run(caller.tenant_id, saved.run_id)
        lora = run.lora
        if saved.version_id is not None:
            lora = registry.versions.by_id(saved.version_id).lora
        return {
            "base_model": run.base_model,
            "optimizer_config": ADAM,
            "is_lora": True,
            "lora_rank": lora.get("rank"),
            **{flag: lora.get(flag) for flag in LORA_FLAGS},
        }

    @routes.post("/copy_weights")
    async def copy_weights(
        caller: Caller,
        body: bodies.CopyWeights,
        x_idempotency_key: Annotated[str | None, Header(max_length=bodies.LONGEST)] = None,
        x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
    ) -> dict[str, Any]:
        refuse_token(body.weights_access_token or x_tinker_weights_access_token)
        version = await to_thread(saver.version_of, caller.tenant_id, body.source_path)
        if body.session_id is not None:
            if body.model_seq_id is None:
                raise InvalidInput("a copy into a session needs a model_seq_id beside session_id")
            path = await to_thread(
                copies.into_session,
                caller,
                body.source_path,
                version,
                session_id=body.session_id,
                number=body.model_seq_id,
                ttl_seconds=body.ttl_seconds,
            )
        elif body.destination_project_id is not None:
            path = await to_thread(
                copies.into_project,
                caller,
                body.source_path,
                version,
                project_id=body.destination_project_id,
                token=x_idempotency_key or registry.new_id(),
                ttl_seconds=body.ttl_seconds,
            )
        else:
            raise InvalidInput(
                "a copy needs a destination_project_id, or a session_id and model_seq_id"
            )
        return {"tinker_path": path}


def refuse_token(token: str | None) -> None:
    """Raises: NotServed: if a token for another account's weights is given."""
    if token is not None:
        raise NotServed(
            "weights_access_token is not served: here nobody reads another tenant's weights"
        )
