"""An answer's text as it grows: what may be shown, and what a stop text takes away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Cutter:
    """Lets text through up to the first stop text.

    What may be the beginning of one is held back until it is clear that it is none.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self._over = False

    def feed(self, text: str) -> str:
        """What may be shown now that there is more text."""
        if self._over:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._over, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, and goes on after."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A token with its logprob (None for a prompt's first) and the likeliest in its place."""

    token: int
    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Scored:
        """From a line of the engine's."""
        return cls(
            token=line["token"],
            text=line["token_text"],
            logprob=line["logprob"],
            top=tuple((text, score) for text, score in line["top"]),
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token's worth of a choice."""

    choice: int
    text: str
    scored: Scored
    finish_reason: str | None


class Pieces:
    """Makes pieces of the engine's lines, for the samples of one prompt.

    Args:
        first: the number of the prompt's first choice.
        stops: texts that end an answer and are no part of it.
    """

    def __init__(self, *, first: int, stops: tuple[str, ...]) -> None:
        self._first = first
        self._stops = stops
        self._cutters: dict[int, Cutter] = {}

    def of(self, line: Mapping[str, Any]) -> Piece:
        """The piece of a line that holds a token."""
        cutter = self._cutters.setdefault(line["index"], Cutter(self._stops))
        text = cutter.feed(line["text"])
        reason = line["stop_reason"] or None
        if reason is not None:
            text += cutter.end()
        return Piece(
            choice=self._first + line["index"],
            text=text,
            scored=Scored.of(line),
            finish_reason=reason,
        )
