"""Safetensors headers: what a file holds and where, without reading its weights.

A file is 8 bytes of little-endian header length, a JSON header, and the tensors' bytes. All
of it is input from outside, so everything the header says is checked before it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.errors import InvalidInput

LENGTH_BYTES = 8
# The safetensors library's own limit; a larger one is an attack on our memory.
LARGEST_HEADER = 100_000_000
METADATA = "__metadata__"

# Bytes of one element, by safetensors' names.
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
FLOATS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a file: its type by safetensors' name, and its place.

    ``start`` and ``end`` count bytes from the beginning of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of data."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a safetensors file holds, in the order of its data."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    size: int


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        InvalidInput: if the file is missing, truncated, or not what the format demands; the
            message names the file and says what to do.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > size - LENGTH_BYTES or length > LARGEST_HEADER:
                expected = min(LENGTH_BYTES + length, LENGTH_BYTES + LARGEST_HEADER)
                raise InvalidInput(
                    f"{path.name} is truncated or no safetensors file: {size} bytes, and its "
                    f"header alone should take {expected}. Fetch the file again."
                )
            raw = file.read(length)
    except FileNotFoundError:
        raise InvalidInput(f"{path.name} is missing from {path.parent}. Fetch it again.") from None
    try:
        document = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{path.name} has a header that is no JSON ({error}). Fetch the file again."
        ) from None
    if not isinstance(document, dict):
        raise InvalidInput(f"{path.name} has a header that is no JSON object. Fetch it again.")
    metadata = document.pop(METADATA, None) or {}
    # It is written again into what is made of the file, and the format wants texts there.
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not texts:
        raise InvalidInput(f"{path.name} has metadata that is no map of texts. Fetch it again.")
    start = LENGTH_BYTES + length
    entries = [_entry(path, name, value, start) for name, value in document.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_cover(path, entries, start, size)
    return Header(
        path=path, tensors={entry.name: entry for entry in entries}, metadata=metadata, size=size
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _entry(path: Path, name: str, value: Any, origin: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, start, end]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise ValueError
        if end - start != ITEM_BYTES[dtype] * math.prod(shape):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise InvalidInput(
            f"{path.name} describes the tensor {name[:200]!r} in a way that makes no sense "
            "(type, shape and offsets do not agree). Fetch the file again."
        ) from None
    return TensorEntry(
        name=name, dtype=dtype, shape=tuple(shape), start=origin + start, end=origin + end
    )


def _check_cover(path: Path, entries: Sequence[TensorEntry], start: int, size: int) -> None:
    """The tensors must fill the rest of the file, without gaps or overlaps."""
    place = start
    for entry in entries:
        if entry.start != place:
            raise InvalidInput(
                f"{path.name} has a gap or an overlap before the tensor {entry.name[:200]!r}. "
                "Fetch the file again."
            )
        place = entry.end
    if place != size:
        what = "truncated" if size < place else "longer than its header says"
        raise InvalidInput(
            f"{path.name} is {what}: its header promises {place} bytes, it has {size}. "
            "Fetch the file again."
        )


def encode_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[TensorEntry]]:
    """The first bytes of a file with these tensors (name, type, shape) in this order.

    Returns the length and header, padded with spaces to a multiple of 8 as the safetensors
    library does, and where each tensor's data then goes. Equal arguments give equal bytes.
    """
    document: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    place, places = 0, []
    for name, dtype, shape in tensors:
        end = place + ITEM_BYTES[dtype] * math.prod(shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        places.append((place, end))
        place = end
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    origin = LENGTH_BYTES + len(raw)
    entries = [
        TensorEntry(
            name=name, dtype=dtype, shape=tuple(shape), start=origin + start, end=origin + end
        )
        for (name, dtype, shape), (start, end) in zip(tensors, places, strict=True)
    ]
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw, entries
