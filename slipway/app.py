"""The control plane's application: every router behind one gate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

import evals.api
import merge.api
import registry.api
import serving.api
import session_core.api
from evals import EvalService
from merge import MergeService
from registry import AuthMiddleware, Jobs, LimitMiddleware, Registry, install_error_handlers
from serving import Endpoints, GatewayProcess, Replicas
from session_core import SessionService
from session_core.dialects import openai, tinker

PUBLIC = frozenset({"/api/v1/healthz"})


@dataclass(frozen=True, kw_only=True)
class Services:
    """What the application serves, made and wired by `slipway.server`."""

    registry: Registry
    jobs: Jobs
    sessions: SessionService
    merges: MergeService
    evals: EvalService
    replicas: Replicas
    endpoints: Endpoints
    gateway: GatewayProcess

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Started, and on leaving stopped: whatever was started, whatever happened."""
        async with AsyncExitStack() as stack:
            # Ended in the reverse order: jobs first, the database last.
            stack.callback(self.registry.db.close)
            await self.replicas.open()
            stack.push_async_callback(self.replicas.stop_all)
            await self.gateway.end_leftover()
            stack.push_async_callback(self.endpoints.close)
            await self.endpoints.open()
            stack.push_async_callback(self.gateway.stop)
            await self.gateway.start()
            stack.push_async_callback(self.sessions.stop)
            await self.sessions.start()
            stack.push_async_callback(self.jobs.stop)
            yield


def create_app(services: Services) -> FastAPI:
    """The application. Starting and stopping the services is the caller's."""
    app = FastAPI(title="Slipway", docs_url="/slipway/v1/docs", openapi_url="/slipway/v1/openapi")
    for router in (
        registry.api.router(services.registry, services.jobs),
        merge.api.router(services.merges),
        evals.api.router(services.evals),
        serving.api.router(services.endpoints),
        session_core.api.router(services.sessions),
        openai.router(services.sessions),
        # Last: it answers for all of its prefix, and says what it does not serve.
        tinker.router(services.sessions),
    ):
        app.include_router(router)
    # The one that was added last is asked first.
    app.add_middleware(LimitMiddleware, larger={**tinker.LARGER, **evals.api.LARGER})
    app.add_middleware(
        AuthMiddleware,
        authenticate=services.registry.tenants.authenticate,
        public=PUBLIC,
        links=services.sessions.signer.claim,
    )
    install_error_handlers(app)
    return app
