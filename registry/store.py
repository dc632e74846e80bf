"""The artifact store: a folder of packages and blobs, addressed by digest.

    packages/<hex>/...            a package's files and its manifest.json
    blobs/<hex>                   small documents: suites, evidence
    .staging/<uuid>/              packages being written

A package is staged, hashed, made durable, and then renamed into its place: it is there whole
or not at all. The digest is over the files' paths, sizes and hashes, so it excludes times and
ids, and the same content staged twice is the same package.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from registry.errors import Corrupt, InvalidInput, NotFound
from registry.files import Files, full_disk_named

MANIFEST = "manifest.json"
PREFIX = "sha256:"


@dataclass(frozen=True, kw_only=True)
class ManifestFile:
    """One file of a package: POSIX path within it, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A package's files, sorted by path, and the digest over them (``sha256:<hex>``)."""

    digest: str
    size_bytes: int
    files: tuple[ManifestFile, ...]


def canonical(value: object) -> bytes:
    """JSON with one spelling only: sorted keys, no spaces, UTF-8.

    Raises:
        InvalidInput: for a text that UTF-8 cannot hold.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInput("a text holds half a surrogate pair, which UTF-8 cannot hold") from None


def manifest_of(files: Iterable[ManifestFile]) -> Manifest:
    """The manifest over some files."""
    ordered = tuple(sorted(files, key=lambda file: file.path))
    digest = PREFIX + hashlib.sha256(canonical([asdict(file) for file in ordered])).hexdigest()
    return Manifest(digest=digest, size_bytes=sum(f.size for f in ordered), files=ordered)


def hex_of(digest: str) -> str:
    """The hex part of a digest.

    Raises:
        InvalidInput: if it is not ``sha256:`` and 64 hex digits.
    """
    body = digest.removeprefix(PREFIX)
    if not digest.startswith(PREFIX) or len(body) != 64 or set(body) - set("0123456789abcdef"):
        raise InvalidInput(f"{digest!r} is no digest: expected sha256: and 64 hex digits")
    return body


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scan(folder: Path) -> list[Path]:
    """Every file below a folder, and nothing but files.

    Raises:
        InvalidInput: for a symbolic link or anything else that is neither file nor folder,
            and for a name that is not UTF-8.
    """
    found = []
    for place, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = Path(place) / name
            try:
                name.encode()
            except UnicodeEncodeError:
                raise InvalidInput(f"the name {os.fsencode(name)!r} is not UTF-8") from None
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                inside = path.relative_to(folder).as_posix()
                raise InvalidInput(
                    f"{inside} is a link or a special file: a package holds plain files only"
                )
            if stat.S_ISREG(mode):
                found.append(path)
    return sorted(found)


class Store:
    """Packages and blobs below one folder, which must be one file system."""

    def __init__(self, root: Path, *, files: Files | None = None) -> None:
        self.root = root
        self._files = files or Files()
        self._packages = root / "packages"
        self._blobs = root / "blobs"
        self._staging = root / ".staging"
        for folder in (self._packages, self._blobs, self._staging):
            self._files.make_folder(folder)

    def stage(self) -> Path:
        """A new empty folder to write a package into."""
        folder = self._staging / uuid.uuid4().hex
        with full_disk_named("starting a package"):
            self._files.make_folder(folder)
        return folder

    def discard(self, staged: Path) -> None:
        """Drop a staged folder."""
        self._files.remove_tree(staged)

    def sweep(self) -> int:
        """Drop what a crash has left of packages and documents; how many there were.

        To be called while nothing is being written.
        """
        left = list(self._staging.iterdir())
        for path in left:
            if path.is_dir() and not path.is_symlink():
                self._files.remove_tree(path)
            else:
                path.unlink(missing_ok=True)
        return len(left)

    def publish(self, staged: Path) -> Manifest:
        """Hash a staged folder and move it into its place, durably.

        Either the whole package is in its place when this returns, or an error is raised and
        nothing of it is left. Publishing content that is there already is fine.

        Raises:
            InvalidInput: if the folder is empty, holds a link, or a ``manifest.json``.
            StorageFull: if the disk is full.
        """
        try:
            with full_disk_named("publishing a package"):
                return self._publish(staged)
        except BaseException:
            self._files.remove_tree(staged)
            raise

    def _publish(self, staged: Path) -> Manifest:
        paths = scan(staged)
        if not paths:
            raise InvalidInput("a package needs at least one file")
        if staged / MANIFEST in paths:
            raise InvalidInput(f"a package must not bring a {MANIFEST} of its own")
        entries = []
        for path in paths:
            self._files.sync(path)
            inside = path.relative_to(staged).as_posix()
            size = path.stat().st_size
            entries.append(ManifestFile(path=inside, size=size, sha256=hash_file(path)))
        manifest = manifest_of(entries)
        target = self.path(manifest.digest)
        if target.exists():
            # The same content is there already, or its place is: never overwrite, but never
            # accept bytes that have rotted either.
            if problems := self.verify(manifest.digest):
                raise Corrupt(f"{manifest.digest} is in the store already, damaged: {problems[0]}")
            self._files.remove_tree(staged)
            return manifest
        document = {"format": 1, "digest": manifest.digest, "files": [asdict(f) for f in entries]}
        self._files.write(staged / MANIFEST, canonical(document))
        for place, _, _ in os.walk(staged):
            self._files.sync(Path(place))
        try:
            self._files.rename(staged, target)
        except OSError:
            # Somebody else published the same content between the look and the rename.
            if not (target / MANIFEST).exists():
                raise
            self._files.remove_tree(staged)
        self._files.sync(self._packages)
        return manifest

    def path(self, digest: str) -> Path:
        """Where a package is, or would be."""
        return self._packages / hex_of(digest)

    def manifest(self, digest: str) -> Manifest:
        """A package's manifest.

        Raises:
            NotFound: if the package is not here.
            Corrupt: if its manifest does not say what its digest stands for.
        """
        path = self.path(digest) / MANIFEST
        try:
            document = json.loads(path.read_bytes())
            manifest = manifest_of(ManifestFile(**entry) for entry in document["files"])
        except FileNotFoundError:
            raise NotFound(f"package {digest} is not in the store") from None
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"the manifest of package {digest} cannot be read: {error}") from None
        if manifest.digest != digest:
            raise Corrupt(f"the manifest of package {digest} is another package's")
        return manifest

    def verify(self, digest: str) -> list[str]:
        """Re-hash a package; what is wrong with it, a line a file, empty if nothing is."""
        try:
            manifest = self.manifest(digest)
        except (NotFound, Corrupt) as error:
            return [error.message]
        folder, problems = self.path(digest), []
        for file in manifest.files:
            path = folder / file.path
            if not path.is_file():
                problems.append(f"{file.path} is missing")
            elif path.stat().st_size != file.size:
                problems.append(f"{file.path} has {path.stat().st_size} bytes, not {file.size}")
            elif hash_file(path) != file.sha256:
                problems.append(f"{file.path} has been altered: its SHA-256 differs")
        return problems

    def put_blob(self, data: bytes) -> str:
        """Keep a small document; its digest.

        Raises:
            StorageFull: if the disk is full.
            Corrupt: if it is here already, damaged.
        """
        name = hashlib.sha256(data).hexdigest()
        target = self._blobs / name
        if not target.exists():
            # A name of its own, since two writers may bring the same document at once.
            partial = self._staging / f"{name}.{uuid.uuid4().hex}"
            try:
                with full_disk_named("keeping a document"):
                    self._files.write(partial, data)
                    self._files.rename(partial, target)
                    self._files.sync(self._blobs)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        elif target.read_bytes() != data:
            raise Corrupt(f"document {PREFIX + name} is in the store already, damaged")
        return PREFIX + name

    def get_blob(self, digest: str) -> bytes:
        """A document by its digest.

        Raises:
            NotFound: if it is not here.
            Corrupt: if its bytes are not what the digest stands for.
        """
        name = hex_of(digest)
        try:
            data = (self._blobs / name).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"document {digest} is not in the store") from None
        if hashlib.sha256(data).hexdigest() != name:
            raise Corrupt(f"document {digest} has been altered: its SHA-256 differs")
        return data
