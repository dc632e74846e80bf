"""Downloads: links that fetch a checkpoint's files without a key, for a while."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from registry import LINKS, Caller, NotFound
from session_core.paths import TinkerPath
from session_core.saved import Saved
from session_core.service import SessionService

# The SDK's command line asks for new links when theirs have less than five minutes left.
LINK_LIVES = timedelta(minutes=15)


def add_routes(routes: APIRouter, service: SessionService) -> None:
    """The route that gives out links, and the one behind them."""
    paths, signer = service.saver.paths, service.signer

    @routes.get(
        "/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls",
    )
    def external_weights_urls(
        request: Request, caller: Caller, run_id: str, kind: str, name: str
    ) -> dict[str, Any]:
        path = TinkerPath(run_id=run_id, kind=kind, name=name)
        saved = paths.get(caller.tenant_id, str(path))
        urls, expires = {}, None
        for file in service.saver.files_of(saved):
            claim = {"tenant": caller.tenant_id, "path": saved.path, "file": file}
            token, expires = signer.sign({**claim, "content": _content(saved)}, lives=LINK_LIVES)
            urls[file] = f"{str(request.base_url).rstrip('/')}{LINKS}{token}/{quote(file)}"
        if expires is None:
            raise NotFound(f"the files of {saved.path} are not there any more")
        return {"urls": urls, "expires": expires.isoformat()}

    # No caller here: the middleware let the link in, and its claim says what it is good for.
    @routes.get(f"{LINKS.removeprefix(routes.prefix)}{{token}}/{{file:path}}")
    def download(request: Request, token: str, file: str) -> FileResponse:
        del token
        claim = request.state.claim
        saved = paths.find(claim["tenant"], claim["path"])
        if saved is None or _content(saved) != claim["content"]:
            raise NotFound(f"{claim['path']} is not there any more, or was saved anew")
        # The last part of the address is for the one who reads it; the claim decides.
        found = service.saver.files_of(saved).get(claim["file"])
        if file != claim["file"] or found is None or not found.is_file():
            raise NotFound(f"{claim['path']} has no file {file}")
        headers = {"Cache-Control": "private, no-store", "X-Content-Type-Options": "nosniff"}
        return FileResponse(
            found, media_type="application/octet-stream", filename=found.name, headers=headers
        )


def _content(saved: Saved) -> str:
    """What a link stays good for: these files, and not what the path may name later."""
    return str(saved.version_id or saved.folder)
