"""What passes between the merge service and its job: a request in, lines of JSON out.

{"progress": {"done": 1, "total": 2, "message": "..."}}      any number
{"report": {...}, "tensors": [...]}                          at the end, exit status 0
{"error": {"code": "...", "message": "..."}}                 at the end, exit status 1
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from registry.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    SlipwayError,
    StorageFull,
    Unavailable,
)

# Raised when equal inputs come to give other bytes, so that older results are not reused.
FORMAT = 1

_ERRORS = {
    error.code: error
    for error in (Conflict, Corrupt, InvalidInput, NotFound, StorageFull, Unavailable)
}


class Request(BaseModel):
    """One merge: folders in, an empty folder out.

    ``link`` allows hard links to the base's files, for a base that never changes.
    ``logits`` compares the merged model with the adapter by running both.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Path
    adapter: Path
    output: Path
    dtype: str | None = None
    base_digest: str | None = None
    recorded_base_digest: str | None = None
    link: bool = False
    logits: bool = True


def error_of(document: dict[str, Any]) -> SlipwayError:
    """The error a job's last line stands for."""
    return _ERRORS.get(document["code"], SlipwayError)(document["message"])
