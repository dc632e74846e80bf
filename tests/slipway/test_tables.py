from __future__ import annotations

import io

import pytest
from rich.console import Console

from slipway.cli.common import facts, plain, short, size, table, when
from slipway.cli.evidence import print_gate

HOSTILE = "[/x] [bold]loud[/bold] [link=http://x]here \x1b[31mred\x07"


def printed(write, width=200):
    sink = io.StringIO()
    write(Console(file=sink, width=width, force_terminal=False))
    return sink.getvalue()


def test_what_a_model_or_a_person_wrote_is_shown_as_it_is():
    for text in (
        printed(facts([("answer", HOSTILE), (HOSTILE, "x")])),
        printed(table("answer", "more", rows=[(HOSTILE, HOSTILE)], empty="")),
    ):
        assert "[/x] [bold]loud[/bold] [link=http://x]here" in text
        assert "\x1b" not in text
        assert "\x07" not in text


def test_a_long_value_is_one_line_and_a_name_is_never_cut():
    assert printed(facts([("digest", "f" * 300)]), width=40).count("\n") == 1
    name = "a-group-with-a-long-name/12"
    assert name in printed(table("version", "x", rows=[(name, "y " * 60)], empty=""), width=40)


def test_an_empty_table_says_so():
    assert printed(table("a", rows=[], empty="No versions yet.")) == "No versions yet.\n"


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (538_090_408, "538.1 MB"), (2e15, "2000.0 TB")],
)
def test_sizes(count, said):
    assert size(count) == said


def test_digests_and_times():
    assert short("sha256:" + "ab" * 32) == "abababababab"
    assert when("2026-01-02T03:04:05.678901+00:00") == "2026-01-02 03:04:05"
    assert plain("a\nb").plain == "a\nb"


def test_a_gate_s_reason_may_hold_brackets():
    numbers = {"gained": 1, "lost": 0, "p": 0.5, "n": 2}
    for side in ("candidate", "baseline"):
        numbers |= {f"{side}_correct": 1, f"{side}_accuracy": 0.5, f"{side}_interval": [0.1, 0.9]}
    gate = {
        "id": "g1",
        "candidate": "a/1",
        "baseline": "b/1",
        "suite_name": "s[/s]",
        "verdict": "inconclusive",
        "reason": "too few [/items]",
        "statistics": numbers,
    }
    shown = printed(lambda console: print_gate(gate, console))
    assert "too few [/items]" in shown
    assert "s[/s]" in shown
    assert "10.0% to 90.0%" in shown
