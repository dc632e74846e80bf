"""Keys and values of the sequences that are being decoded, one row each.

Rows are aligned at the right: the newest token of all of them is in one column, and a short
row has nothing in its first columns. The storage has room to grow to the right, so a token
is written and nothing is copied; rows that end are filled up with others, and rows that come
are written behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

SPARE_COLUMNS = 64
"""Tokens that are written before the storage is made anew."""


class RowLayer(DynamicLayer):
    """One layer: keys and values [rows, heads, columns, width] in a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.low = 0
        self.high = 0
        self._storage: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the next tokens of all rows [rows, heads, T, width]; all keys and values."""
        del args, kwargs
        count = key_states.shape[-2]
        self._reserve(key_states, value_states, rows=self.rows, left=0, right=count)
        for stored, fresh in zip(self._stored(), (key_states, value_states), strict=True):
            stored[: self.rows, :, self.high : self.high + count] = fresh
        self.high += count
        return self._show()

    def join(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add rows [m, heads, T, width], aligned at the right with those there are."""
        count, columns = keys.shape[0], keys.shape[-2]
        rows = self.rows + count
        self._reserve(keys, values, rows=rows, left=columns, right=0)
        for stored, fresh in zip(self._stored(), (keys, values), strict=True):
            stored[self.rows : rows, :, self.high - columns : self.high] = fresh
        self.rows = rows
        self.low = min(self.low, self.high - columns)
        self._show()

    def keep(self, moves: Sequence[tuple[int, int]], rows: int, columns: int) -> None:
        """Move rows (from, to), then keep the first `rows` and the last `columns`."""
        if moves:
            source, target = (list(side) for side in zip(*moves, strict=True))
            for stored in self._stored():
                window = stored[:, :, self.low : self.high]
                window[target] = window[source]
        self.rows = rows
        self.low = self.high - columns
        self._show()

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.high - self.low

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._storage is not None
        return self._storage

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (stored[: self.rows, :, self.low : self.high] for stored in self._stored())
        self.keys, self.values = keys, values
        self.is_initialized = True
        return keys, values

    def _reserve(
        self, keys: torch.Tensor, values: torch.Tensor, *, rows: int, left: int, right: int
    ) -> None:
        """Have room for `rows` rows, `left` columns up to the newest, `right` behind it."""
        if self._storage is not None:
            held = self._storage[0].shape
            if rows <= held[0] and left <= self.high and self.high + right <= held[2]:
                return
        used = self.high - self.low
        before = max(used, left)
        fresh = []
        for index, like in enumerate((keys, values)):
            # Zeros: what no row has written is masked out, but must be finite for that.
            made = like.new_zeros(
                max(rows, self.rows), like.shape[1], before + right + SPARE_COLUMNS, like.shape[3]
            )
            if self._storage is not None:
                window = self._storage[index][: self.rows, :, self.low : self.high]
                made[: self.rows, :, before - used : before] = window
            fresh.append(made)
        self._storage = (fresh[0], fresh[1])
        self.low, self.high = before - used, before


def rows_can_join(config: Any) -> bool:
    """Whether rows of a model can be brought to one length by leaving columns empty.

    True where every layer attends to keys, all of them or those in a window; a recurrent
    state cannot be shifted, and a chunk begins at a column of its own.
    """
    text = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        return False
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    # transformers makes a plain layer for each where it knows of nothing else.
    return all(type(layer) in plain for layer in DynamicCache(config=config).layers)


def row_cache(layers: int) -> Any:
    """An empty cache of rows for a model of so many layers."""
    return Cache(layers=[RowLayer() for _ in range(layers)])


def fill_holes(alive: Sequence[bool]) -> tuple[list[int], list[tuple[int, int]]]:
    """How to keep the living rows in the first places, moving as few as can be.

    Returns the order of the old rows in their new places, and the moves (from, to).
    """
    living = sum(alive)
    order = list(range(living))
    holes = [row for row in range(living) if not alive[row]]
    behind = [row for row in range(living, len(alive)) if alive[row]]
    moves = list(zip(behind, holes, strict=True))
    for source, target in moves:
        order[target] = source
    return order, moves
