"""A process that ends in the middle of keeping a document, at every point it can."""

from __future__ import annotations

import subprocess
import sys

from registry import Store

KILLED = """
import os, sys
from pathlib import Path
from registry import Files, Store

class Deadly(Files):
    count = 0
    def step(self):
        Deadly.count += 1
        if Deadly.count == int(sys.argv[2]):
            os._exit(9)
    def write(self, path, data):
        self.step()
        path.write_bytes(data[:3])
        self.step()
        super().write(path, data)
        self.step()
    def sync(self, path):
        self.step(); super().sync(path); self.step()
    def rename(self, source, target):
        self.step(); super().rename(source, target); self.step()

Store(Path(sys.argv[1]), files=Deadly()).put_blob(b"evidence")
"""


def test_killed_at_every_step_a_document_is_there_whole_or_not_at_all(tmp_path):
    ends, kept = [], []
    while not ends or ends[-1] != 0:
        root = tmp_path / str(len(ends))
        command = [sys.executable, "-c", KILLED, str(root), str(len(ends) + 1)]
        ends.append(subprocess.run(command, check=False, timeout=60).returncode)
        store = Store(root)
        kept.append(len(list((root / "blobs").iterdir())))
        store.sweep()
        assert list((root / ".staging").iterdir()) == []
        assert store.sweep() == 0
        assert store.get_blob(store.put_blob(b"evidence")) == b"evidence"
    assert ends[:-1] == [9] * 7
    # Three steps of writing and one before the rename leave nothing in place.
    assert kept == [0, 0, 0, 0, 1, 1, 1, 1]
