from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from registry import Corrupt, Files, InvalidInput, NotFound, StorageFull, Store, canonical


class Faulty(Files):
    """Fails its n-th operation that can fail, and counts them."""

    def __init__(self, at: int = -1, code: int = errno.ENOSPC) -> None:
        self.at = at
        self.code = code
        self.count = 0

    def _step(self, path) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            raise OSError(self.code, os.strerror(self.code), str(path))

    def make_folder(self, path):
        self._step(path)
        super().make_folder(path)

    def write(self, path, data):
        self._step(path)
        super().write(path, data)

    def sync(self, path):
        self._step(path)
        super().sync(path)

    def rename(self, source, target):
        self._step(source)
        super().rename(source, target)


def package(store: Store, text: str = "weights"):
    staged = store.stage()
    (staged / "inner").mkdir()
    (staged / "inner" / "a.txt").write_text(text)
    (staged / "b.txt").write_text("b")
    return staged


def litter(store: Store) -> list[str]:
    return [path.name for path in (store.root / ".staging").iterdir()]


def test_a_published_package_is_whole_and_addressed_by_its_content(tmp_path):
    store = Store(tmp_path)
    manifest = store.publish(package(store))
    assert [file.path for file in manifest.files] == ["b.txt", "inner/a.txt"]
    assert manifest.size_bytes == 8
    assert store.verify(manifest.digest) == []
    assert store.manifest(manifest.digest) == manifest
    assert store.publish(package(store)) == manifest
    assert store.publish(package(store, "other")).digest != manifest.digest
    assert litter(store) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_fault_at_every_step_leaves_nothing_and_harms_nothing(tmp_path, code):
    counting = Faulty()
    clean = Store(tmp_path / "clean", files=counting)
    staged = package(clean)
    before = counting.count
    clean.publish(staged)
    steps = counting.count - before
    assert steps >= 7  # two files, the manifest, two folders, the rename, the parent

    hit = set()
    for step in range(steps):
        files = Faulty()
        store = Store(tmp_path / f"{code}-{step}", files=files)
        earlier = store.publish(package(store, "earlier"))
        staged = package(store)
        files.at, files.count, files.code = step, 0, code
        expected = OSError if code == errno.EIO else StorageFull
        with pytest.raises(expected):
            store.publish(staged)
        hit.add(files.at)
        assert litter(store) == []
        assert store.verify(earlier.digest) == []
        files.at = -1
        # Whatever is in place is whole, and trying again works.
        for folder in (store.root / "packages").iterdir():
            assert store.verify(f"sha256:{folder.name}") == []
        assert store.verify(store.publish(package(store)).digest) == []
    assert hit == set(range(steps))


KILLED = """
import os, signal, sys
from pathlib import Path
from registry import Files, Store

class Deadly(Files):
    count = 0
    def step(self):
        Deadly.count += 1
        if Deadly.count == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    def write(self, path, data):
        self.step(); super().write(path, data); self.step()
    def sync(self, path):
        self.step(); super().sync(path)
    def rename(self, source, target):
        self.step(); super().rename(source, target); self.step()

store = Store(Path(sys.argv[1]), files=Deadly())
staged = store.stage()
(staged / "a.txt").write_text("weights")
store.publish(staged)
"""


def test_killed_at_every_step_a_package_is_there_whole_or_not_at_all(tmp_path):
    ends, step = [], 0
    while not ends or ends[-1] != 0:
        step += 1
        root = tmp_path / str(step)
        done = subprocess.run([sys.executable, "-c", KILLED, str(root), str(step)], check=False)
        ends.append(done.returncode)
        store = Store(root)
        found = list((root / "packages").iterdir())
        for folder in found:
            assert store.verify(f"sha256:{folder.name}") == []
        store.sweep()
        assert litter(store) == []
        assert store.verify(store.publish(package(store)).digest) == []
    assert ends[:-1] == [-signal.SIGKILL] * (step - 1)
    assert step > 6


def test_sweeping_drops_what_was_left_and_counts_it(tmp_path):
    store = Store(tmp_path)
    package(store)
    package(store)
    assert Store(tmp_path).sweep() == 2
    assert litter(store) == []


def test_hostile_packages_are_refused_and_leave_nothing(tmp_path):
    store = Store(tmp_path / "store")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    for spoil, said in (
        (lambda staged: (staged / "link").symlink_to(secret), "link"),
        (lambda staged: (staged / "inner" / "up").symlink_to(tmp_path), "up"),
        (lambda staged: os.mkfifo(staged / "pipe"), "pipe"),
        (lambda staged: (staged / "manifest.json").write_text("{}"), "manifest.json"),
    ):
        staged = package(store)
        spoil(staged)
        with pytest.raises(InvalidInput, match=said):
            store.publish(staged)
    with pytest.raises(InvalidInput, match="at least one file"):
        store.publish(store.stage())
    assert litter(store) == []
    assert secret.read_text() == "secret"


@pytest.mark.parametrize("digest", ["", "../../etc", "sha256:..", "sha256:" + "g" * 64, "md5:00"])
def test_what_is_no_digest_names_no_path(tmp_path, digest):
    with pytest.raises(InvalidInput, match="digest"):
        Store(tmp_path).path(digest)


def test_damage_is_found_and_named(tmp_path):
    store = Store(tmp_path)
    digest = store.publish(package(store)).digest
    folder = store.path(digest)
    (folder / "b.txt").write_text("c")
    assert store.verify(digest) == ["b.txt has been altered: its SHA-256 differs"]
    (folder / "b.txt").write_text("longer")
    assert "has 6 bytes, not 1" in store.verify(digest)[0]
    (folder / "b.txt").unlink()
    assert store.verify(digest) == ["b.txt is missing"]
    with pytest.raises(Corrupt, match="damaged"):
        store.publish(package(store))
    (folder / "manifest.json").write_text("[")
    with pytest.raises(Corrupt, match="cannot be read"):
        store.manifest(digest)
    with pytest.raises(NotFound):
        store.manifest("sha256:" + "0" * 64)


def test_documents_are_kept_and_checked(tmp_path):
    store = Store(tmp_path)
    digest = store.put_blob(b"evidence")
    assert store.put_blob(b"evidence") == digest
    assert store.get_blob(digest) == b"evidence"
    (tmp_path / "blobs" / digest.removeprefix("sha256:")).write_bytes(b"forged")
    with pytest.raises(Corrupt):
        store.get_blob(digest)
    # Bringing the right bytes again must not report them as kept.
    with pytest.raises(Corrupt):
        store.put_blob(b"evidence")
    assert litter(store) == []
    with pytest.raises(NotFound):
        store.get_blob("sha256:" + "0" * 64)


def test_a_full_disk_while_keeping_a_document(tmp_path):
    files = Faulty()
    store = Store(tmp_path, files=files)
    for step in range(3):
        files.at, files.count = step, 0
        with pytest.raises(StorageFull, match="full"):
            store.put_blob(b"%d" % step)
        assert litter(store) == []
    files.at = -1
    assert store.get_blob(store.put_blob(b"later")) == b"later"


def test_names_and_texts_that_are_not_unicode_are_refused(tmp_path):
    store = Store(tmp_path)
    staged = package(store)
    (staged / os.fsdecode(b"\xff.txt")).write_text("a")
    with pytest.raises(InvalidInput, match=r"xff\.txt.*UTF-8"):
        store.publish(staged)
    assert litter(store) == []
    with pytest.raises(InvalidInput, match="surrogate"):
        canonical({"question": "\ud800"})


def test_a_fault_while_starting_a_package_and_dropping_one(tmp_path):
    files = Faulty()
    store = Store(tmp_path, files=files)
    files.at, files.count = 0, 0
    with pytest.raises(StorageFull, match="starting a package"):
        store.stage()
    files.at = -1
    staged = package(store)
    store.discard(staged)
    store.discard(staged)
    assert litter(store) == []
