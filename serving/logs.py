"""What a dead child's log has to say, in one line."""

from __future__ import annotations

import re
import signal
from pathlib import Path

_TAIL_BYTES = 256 * 1024
# vLLM puts "(EngineCore pid=12) ERROR 12-01 12:01:16 [core.py:402] " before every line.
_PREFIX = re.compile(
    r"^(?:\([\w\- ]+ pid=\d+\)\s*)?"
    r"(?:(?:ERROR|WARNING|INFO|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\]\s?)?)?"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?::|$)")
_ERROR_LINE = re.compile(r"(?:^|\s)(?:error|fatal|critical)\b[:\]]", re.IGNORECASE)
# Exceptions that only say that another one, further up, is the reason.
_HEARSAY = ("See root cause above", "See stack trace for root cause", "cancel_scope")


def telling_line(log: Path, *, start: int = 0, limit: int = 500) -> str:
    """The line of `log` that says why the process ended, at most `limit` characters.

    Looks at what was written from byte `start` on. The line is the last exception which is
    not a mere report of another one; failing that the last line that calls itself an error,
    failing that the last line.
    """
    lines = [_PREFIX.sub("", _COLOUR.sub("", line)).rstrip() for line in _tail(log, start)]
    lines = [line for line in lines if line.strip()]
    if not lines:
        return "its log is empty"
    exceptions = [
        line for line in lines if _EXCEPTION.match(line) and not any(h in line for h in _HEARSAY)
    ]
    errors = [line for line in lines if _ERROR_LINE.search(line)]
    chosen = (exceptions or errors or lines)[-1].strip()
    return chosen if len(chosen) <= limit else chosen[: limit - 1] + "…"


def how_it_ended(returncode: int) -> str:
    """`returncode` of `subprocess` in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"ended by signal {-returncode}"


def _tail(log: Path, start: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
