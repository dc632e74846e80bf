"""Names of runs, samplers and what is saved from them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from registry import InvalidInput

SCHEME = "tinker://"
WEIGHTS = "weights"  # resumes training
SAMPLER_WEIGHTS = "sampler_weights"  # to sample from and to deploy
EXTERNAL_WEIGHTS = "external_weights"  # to carry away
KINDS = (WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class TinkerPath:
    """``tinker://<run>/<weights|sampler_weights|external_weights>/<name>``."""

    run_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"


def parse_path(text: str) -> TinkerPath:
    """Take a path apart.

    Raises:
        InvalidInput: saying what such a path looks like.
    """
    parts = text.removeprefix(SCHEME).split("/")
    if not text.startswith(SCHEME) or len(parts) != 3 or not all(parts):
        raise InvalidInput(
            f"{text!r} is no path of saved weights: expected tinker://RUN/weights/NAME or "
            "tinker://RUN/sampler_weights/NAME, as a save returned it"
        )
    if parts[1] not in KINDS:
        raise InvalidInput(f"{text!r} names {parts[1]!r}: expected one of {', '.join(KINDS)}")
    return TinkerPath(run_id=parts[0], kind=parts[1], name=parts[2])


def check_name(name: str) -> str:
    """A save's name, checked. Raises: InvalidInput."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} is no name for a save: use letters, digits, '.', '_' and '-', at most 128"
        )
    return name


def run_id_of(session_id: str, number: int) -> str:
    """The id of a session's n-th run; clients compute it too."""
    return f"{session_id}:train:{number}"


def sampler_id_of(session_id: str, number: int) -> str:
    """The id of a session's n-th sampler."""
    return f"{session_id}:sample:{number}"


def folder_name(identifier: str) -> str:
    """An id as a folder's name."""
    return identifier.replace(":", "-")
