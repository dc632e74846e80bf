from __future__ import annotations

import signal
from pathlib import Path

import pytest

from serving.logs import how_it_ended, telling_line


@pytest.mark.parametrize(
    ("log", "line"),
    [
        pytest.param("", "its log is empty", id="empty"),
        pytest.param("starting\nhalf way\n", "half way", id="last line"),
        pytest.param(
            "Traceback (most recent call last):\n  File 'x'\nKeyError: 'a'\nbye\n",
            "KeyError: 'a'",
            id="exception before other lines",
        ),
        pytest.param(
            "(EngineCore pid=5) ERROR 12-01 12:01:16 [core.py:4] ValueError: no room\n"
            "(APIServer pid=4) RuntimeError: Engine core initialization failed. "
            "See root cause above. Failed core proc(s): {}\n",
            "ValueError: no room",
            id="the root cause and not the report of it",
        ),
        pytest.param(
            "usage: x\napi_server.py: error: argument --dtype: invalid choice: 'x'\n",
            "api_server.py: error: argument --dtype: invalid choice: 'x'",
            id="argparse",
        ),
        pytest.param(
            "ERROR:    [Errno 98] error while attempting to bind on address\nGood bye\n",
            "ERROR:    [Errno 98] error while attempting to bind on address",
            id="uvicorn",
        ),
        pytest.param(
            "\x1b[31msafetensors_rust.SafetensorError: Error while reading\x1b[0m\n",
            "safetensors_rust.SafetensorError: Error while reading",
            id="colours and dotted names",
        ),
        pytest.param("huggingface_hub.errors.HFValidationError: bad\n", None, id="nested module"),
    ],
)
def test_telling_line(tmp_path: Path, log: str, line: str | None) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert telling_line(path) == (line or log.strip())


def test_telling_line_of_no_log(tmp_path: Path) -> None:
    assert telling_line(tmp_path / "missing") == "its log is empty"


def test_only_what_came_after_start_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("ValueError: old\n")
    start = path.stat().st_size
    with path.open("a") as file:
        file.write("new line\n")
    assert telling_line(path, start=start) == "new line"


def test_long_lines_and_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\n" * 200_000 + b"ValueError: " + b"x" * 900)
    line = telling_line(path)
    assert line.startswith("ValueError: xxx")
    assert len(line) == 500


def test_how_it_ended() -> None:
    assert how_it_ended(3) == "exit code 3"
    assert how_it_ended(-signal.SIGKILL) == "ended by SIGKILL"
    assert how_it_ended(-200) == "ended by signal 200"
