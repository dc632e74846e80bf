"""Raw tensors on disk, read and written by blocks of rows."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch

from merge.headers import TensorEntry

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COPY_BYTES = 8 << 20


class RawFile:
    """An open file that is read and written at given places, from any thread.

    Tests subclass it to fail at a chosen operation.
    """

    def __init__(self, path: os.PathLike[str], *, write: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if write else os.O_RDONLY
        self._descriptor = os.open(path, flags, 0o644)

    def __enter__(self) -> RawFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer from a place.

        Raises:
            EOFError: if the file ends before.
        """
        place = 0
        while place < len(buffer):
            got = os.preadv(self._descriptor, [buffer[place:]], start + place)
            if got == 0:
                raise EOFError("the file ended while it was being read")
            place += got

    def write(self, start: int, data: memoryview) -> None:
        """Write all of some bytes at a place."""
        place = 0
        while place < len(data):
            place += os.pwrite(self._descriptor, data[place:], start + place)

    def copy(self, source: RawFile, start: int, size: int, to: int) -> None:
        """Copy bytes from another file, by bounded pieces."""
        buffer = bytearray(min(size, _COPY_BYTES))
        for place in range(0, size, _COPY_BYTES):
            piece = memoryview(buffer)[: min(_COPY_BYTES, size - place)]
            source.read(start + place, piece)
            self.write(to + place, piece)


def view(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's bytes."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array.reshape(-1)).cast("B")


def row_bytes(entry: TensorEntry) -> int:
    """Bytes of one row, a row being one index of the first dimension."""
    return entry.size // entry.shape[0] if entry.shape and entry.shape[0] else entry.size


def read_rows(file: RawFile, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
    """Rows [stop - start, columns] of a matrix, in the type they are stored in."""
    rows = torch.empty((stop - start, entry.shape[1]), dtype=DTYPES[entry.dtype])
    file.read(entry.start + start * row_bytes(entry), view(rows))
    return rows


def read_matrix(file: RawFile, entry: TensorEntry) -> torch.Tensor:
    """A whole matrix in float32."""
    return read_rows(file, entry, 0, entry.shape[0]).float()
