"""The SDK's REST client: what runs, checkpoints and sessions there are."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from registry import Caller
from session_core.dialects.tinker import bodies
from session_core.models import SavedPath, TrainingRun
from session_core.paths import WEIGHTS, parse_path
from session_core.service import SessionService

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]


def add_routes(routes: APIRouter, service: SessionService) -> None:
    """Read-only routes."""
    operations, registry = service.operations, service.registry

    def checkpoint(saved: SavedPath) -> dict[str, Any]:
        path = parse_path(saved.path)
        version = registry.versions.by_id(saved.version_id)
        return {
            "checkpoint_id": f"{path.kind}/{path.name}",
            "checkpoint_type": "training" if path.kind == WEIGHTS else "sampler",
            "time": saved.created_at.isoformat(),
            "tinker_path": saved.path,
            "size_bytes": version.size_bytes,
            "public": False,
            "user_metadata": {k: str(v) for k, v in version.user_metadata.items()},
        }

    def described(tenant_id: str, run: TrainingRun) -> dict[str, Any]:
        saved = [checkpoint(s) for s in operations.saved_paths(tenant_id, run_id=run.id)]
        newest = {
            kind: next((c for c in saved if c["checkpoint_type"] == kind), None)
            for kind in ("training", "sampler")
        }
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": tenant_id,
            "is_lora": True,
            "corrupted": run.corrupted is not None,
            "lora_rank": run.lora.get("rank"),
            "last_request_time": run.created_at.isoformat(),
            "last_checkpoint": newest["training"],
            "last_sampler_checkpoint": newest["sampler"],
            "user_metadata": {k: str(v) for k, v in run.user_metadata.items()},
        }

    def page(rows: Sequence[Any], limit: int, offset: int) -> dict[str, Any]:
        return {"offset": offset, "limit": limit, "total_count": len(rows)}

    @routes.get("/training_runs")
    def list_runs(caller: Caller, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        rows = operations.runs(caller.tenant_id)
        shown = [described(caller.tenant_id, run) for run in rows[offset : offset + limit]]
        return {"training_runs": shown, "cursor": page(rows, limit, offset)}

    @routes.get("/training_runs/{run_id}")
    def show_run(caller: Caller, run_id: str) -> dict[str, Any]:
        return described(caller.tenant_id, operations.run(caller.tenant_id, run_id))

    @routes.get("/training_runs/{run_id}/checkpoints")
    def run_checkpoints(caller: Caller, run_id: str) -> dict[str, Any]:
        run = operations.run(caller.tenant_id, run_id)
        rows = operations.saved_paths(caller.tenant_id, run_id=run.id)
        return {"checkpoints": [checkpoint(row) for row in rows]}

    @routes.get("/checkpoints")
    def list_checkpoints(caller: Caller, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        rows = operations.saved_paths(caller.tenant_id)
        shown = [checkpoint(row) for row in rows[offset : offset + limit]]
        return {"checkpoints": shown, "cursor": page(rows, limit, offset)}

    @routes.post("/weights_info")
    def weights_info(caller: Caller, body: bodies.WeightsInfo) -> dict[str, Any]:
        version = service.saver.version_of(caller.tenant_id, body.tinker_path)
        flags = ("train_unembed", "train_mlp", "train_attn")
        return {
            "base_model": version.base_model,
            "is_lora": True,
            "lora_rank": version.lora.get("rank"),
            **{flag: version.lora.get(flag) for flag in flags},
        }

    @routes.get("/sessions/{session_id}")
    async def show_session(caller: Caller, session_id: str) -> dict[str, Any]:
        session = await to_thread(operations.session, caller.tenant_id, session_id)
        runs = await to_thread(operations.runs, session_id=session_id)
        samplers = await to_thread(operations.samplers, session_id)
        return {
            "training_run_ids": [run.id for run in runs],
            "sampler_ids": [sampler.id for sampler in samplers],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    @routes.get("/sessions")
    async def list_sessions(
        caller: Caller, limit: Limit = 20, offset: Offset = 0
    ) -> dict[str, Any]:
        rows = await to_thread(operations.sessions, caller.tenant_id)
        return {"sessions": [row.id for row in rows[offset : offset + limit]]}
