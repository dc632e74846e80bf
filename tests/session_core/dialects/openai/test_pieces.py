"""An answer's text as it grows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from session_core.dialects.openai.pieces import Cutter, Pieces

letters = st.text(alphabet="ab", max_size=12)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


@given(parts=st.lists(letters, max_size=8), stops=stops)
def test_what_is_shown_is_the_text_up_to_the_first_stop(parts: list[str], stops: list[str]) -> None:
    cutter = Cutter(tuple(stops))
    shown = [cutter.feed(part) for part in parts] + [cutter.end()]
    whole = "".join(parts)
    # The first stop by when it was complete is what an engine that looks after every part sees.
    seen, expected = "", whole
    for part in parts:
        seen += part
        places = [seen.find(stop) for stop in stops if stop in seen]
        if places:
            expected = seen[: min(places)]
            break
    assert "".join(shown) == expected


@given(parts=st.lists(letters, max_size=8), stops=stops)
def test_nothing_is_held_back_that_cannot_begin_a_stop(parts: list[str], stops: list[str]) -> None:
    cutter = Cutter(tuple(stops))
    shown = ""
    for number, part in enumerate(parts):
        shown += cutter.feed(part)
        seen = "".join(parts[: number + 1])
        if any(stop in seen for stop in stops):
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def line(index: int, text: str, reason: str = "") -> dict[str, object]:
    return {
        "index": index,
        "token": 5,
        "token_text": text,
        "text": text,
        "logprob": -1.0,
        "top": [],
        "stop_reason": reason,
    }


def test_samples_of_a_prompt_are_cut_apart_and_numbered_on() -> None:
    pieces = Pieces(first=4, stops=("END",))
    said = [
        pieces.of(row)
        for row in (
            line(0, "one E"),
            line(1, "two E"),
            line(0, "ND", "stop"),
            line(1, "x", "length"),
        )
    ]
    assert [(p.choice, p.text, p.finish_reason) for p in said] == [
        (4, "one ", None),
        (5, "two ", None),
        (4, "", "stop"),
        (5, "Ex", "length"),
    ]


def test_what_looked_like_a_stop_comes_with_the_end() -> None:
    pieces = Pieces(first=0, stops=("END",))
    assert pieces.of(line(0, "the E", "length")).text == "the E"
