from __future__ import annotations

import copy
from html.parser import HTMLParser

import pytest

DIGEST = "sha256:" + "ab" * 32
RESULTS = {
    "base_model": "org/tiny",
    "seconds": 600.0,
    "finished": "2026-01-02 03:04 UTC",
    "stages": [{"name": "Merge", "seconds": 3.0}],
    "versions": [
        {"reference": "tiny/1", "kind": "merged", "digest": DIGEST, "parents": []},
        {"reference": "sums/1", "kind": "checkpoint", "digest": DIGEST, "parents": ["tiny/1"]},
        {
            "reference": "sums/2",
            "kind": "merged",
            "digest": DIGEST,
            "parents": ["tiny/1", "sums/1"],
        },
    ],
    "losses": {
        "killed": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.25}],
        "resumed": [{"step": 2, "loss": 1.25}, {"step": 3, "loss": 0.5}],
    },
    "resume": {"from_step": 1, "killed_at": 2, "steps": [2], "before": [1.25], "after": [1.25]},
    "runs": [
        {
            "reference": "tiny/1",
            "candidate": False,
            "correct": 2,
            "items": 40,
            "counts": {"correct": 2, "wrong": 37, "no_answer": 1},
            "interval": [0.013, 0.165],
        },
        {
            "reference": "sums/2",
            "candidate": True,
            "correct": 30,
            "items": 40,
            "counts": {"correct": 30, "wrong": 10},
            "interval": [0.598, 0.858],
        },
    ],
    "gates": [
        {
            "candidate": "sums/2",
            "baseline": "tiny/1",
            "gained": 29,
            "lost": 1,
            "p": 2.9e-8,
            "verdict": "pass",
            "reason": "better",
        }
    ],
    "endpoint": {
        "name": "sums",
        "url": "http://127.0.0.1:8001/v1",
        "version": "sums/2",
        "digest": DIGEST,
        "replica_id": "0123456789",
        "evaluated_here": True,
    },
    "answers": [{"question": "12 + 34 =", "answer": "46", "endpoint": "46", "base": "is 12"}],
}


class Page(HTMLParser):
    """The text of a page and what it would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            remote = (value or "").startswith(("http:", "https:", "//"))
            if remote and name in ("src", "href") and tag != "a":
                self.loads.append(value)

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def written(recipe, tmp_path):
    def write(results):
        page, png = tmp_path / "report.html", tmp_path / "report.png"
        recipe("report").write_report(results, html_path=page, png_path=png)
        parsed = Page()
        parsed.feed(page.read_text())
        return page.read_text(), parsed, png.read_bytes()

    return write


def test_the_page_holds_the_figure_and_every_number(written):
    source, page, png = written(RESULTS)
    assert "<svg" in source
    for text in ("30 of 40", "75.0%", "29 / 1", "2.9e-08", "1.25", DIGEST, "no_answer 1"):
        assert text in page.text
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_the_page_loads_nothing_from_elsewhere(written):
    _, page, _ = written(RESULTS)
    assert page.loads == []


def test_what_a_model_says_is_text_and_not_markup(written):
    results = copy.deepcopy(RESULTS)
    results["answers"][0]["endpoint"] = "<script>alert(1)</script> $\\frac$"
    source, page, _ = written(results)
    assert "<script>" not in source
    assert "<script>alert(1)</script>" in page.text
