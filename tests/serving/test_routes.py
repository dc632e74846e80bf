from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from serving.routes import Route, Routes, RoutesFile, write


def route(name: str = "a", tenant: str = "t", version: str = "g/1") -> Route:
    return Route(
        tenant_id=tenant,
        name=name,
        url="http://127.0.0.1:1",
        model="g--abc",
        version=version,
        digest="sha256:abc",
        created=1,
    )


def test_a_snapshot_survives_the_file(tmp_path: Path) -> None:
    key = hashlib.sha256(b"tml-secret").hexdigest()
    routes = Routes(keys={key: "t"}, routes=(route("b"), route("a"), route("a", "u")))
    write(tmp_path / "gateway" / "routes.json", routes)
    read = RoutesFile(tmp_path / "gateway" / "routes.json").current()
    assert read.tenant("tml-secret") == "t"
    assert read.tenant("tml-other") is None
    assert read.tenant("") is None
    assert [r.name for r in read.of("t")] == ["a", "b"]
    assert read.find("u", "a") == route("a", "u")
    assert read.find("u", "b") is None
    assert read.to_json() == routes.to_json()


def test_the_file_is_for_its_owner_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "gateway" / "routes.json"
    write(path, Routes())
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["routes.json"]


def test_changes_are_seen_and_nonsense_is_not(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    file = RoutesFile(path)
    assert file.current() == Routes()
    write(path, Routes(routes=(route("a"),)))
    assert [r.name for r in file.current().of("t")] == ["a"]
    write(path, Routes(routes=(route("b"),)))
    assert [r.name for r in file.current().of("t")] == ["b"]
    for nonsense in ("{", "[]", '{"format": 9}', '{"format": 1, "keys": {}, "routes": [{}]}'):
        path.write_text(nonsense)
        assert [r.name for r in file.current().of("t")] == ["b"]
    path.unlink()
    assert [r.name for r in file.current().of("t")] == ["b"]
    write(path, Routes())
    assert file.current().of("t") == []


def test_a_failed_write_leaves_the_old_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gateway" / "routes.json"
    write(path, Routes(routes=(route("a"),)))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, Routes())
    assert [p.name for p in path.parent.iterdir()] == ["routes.json"]
    assert json.loads(path.read_text())["routes"][0]["name"] == "a"


def test_a_reader_never_sees_half_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    sizes = (1, 400)
    write(path, Routes(routes=(route(),)))
    stop = threading.Event()
    seen: set[int] = set()
    problems: list[Exception] = []

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add(len(Routes.from_json(path.read_text()).routes))
            except Exception as error:
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(100):
        many = tuple(route(f"e{n}") for n in range(sizes[turn % 2]))
        write(path, Routes(routes=many))
    stop.set()
    reader.join()
    assert not problems
    assert seen <= set(sizes)
