"""The storage of keys and values against plain concatenation."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

from session_core.rows import RowLayer, fill_holes, row_cache, rows_can_join


def fresh(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, columns, 3, generator=generator)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.integers(1, 3), st.integers(1, 90)),
            st.tuples(st.just("append"), st.just(0), st.integers(1, 3)),
            st.tuples(st.just("leave"), st.integers(0, 2**8), st.just(0)),
        ),
        max_size=25,
    )
)
def test_every_row_keeps_its_own(events: list[tuple[str, int, int]]) -> None:
    layer = RowLayer()
    rows: list[torch.Tensor] = []  # keys of each row, [heads, its columns, width]
    for number, (what, count, columns) in enumerate(events):
        if what == "join":
            keys = fresh(count, columns, number)
            layer.join(keys, -keys)
            rows += list(keys)
        elif what == "append" and rows:
            keys = fresh(len(rows), columns, number)
            layer.update(keys, -keys)
            rows = [torch.cat([old, new], dim=1) for old, new in zip(rows, keys, strict=True)]
        elif what == "leave" and rows:
            alive = [not count >> (row % 9) & 1 for row in range(len(rows))]
            if not any(alive):
                continue
            order, moves = fill_holes(alive)
            rows = [rows[row] for row in order]
            layer.keep(moves, len(rows), max(row.shape[1] for row in rows))
        if not rows:
            continue
        width = max(row.shape[1] for row in rows)
        assert layer.get_seq_length() == layer.keys.shape[-2] == width
        assert torch.isfinite(layer.keys).all()
        for index, row in enumerate(rows):
            assert torch.equal(layer.keys[index, :, width - row.shape[1] :], row)
            assert torch.equal(layer.values[index, :, width - row.shape[1] :], -row)


@given(st.lists(st.booleans(), max_size=20))
def test_holes_are_filled_with_the_fewest_moves(alive: list[bool]) -> None:
    order, moves = fill_holes(alive)
    assert sorted(order) == [row for row, lives in enumerate(alive) if lives]
    assert len(moves) == sum(not lives for lives in alive[: len(order)])
    places = list(range(len(alive)))
    for source, target in moves:
        places[target] = source
    assert places[: len(order)] == order


def test_a_token_is_written_without_a_copy() -> None:
    (layer,) = row_cache(1).layers
    keys = fresh(2, 5, 0)
    layer.join(keys, keys)
    layer.update(fresh(2, 1, 1), fresh(2, 1, 1))
    before = layer.keys.data_ptr()
    for number in range(20):
        layer.update(fresh(2, 1, number), fresh(2, 1, number))
    assert layer.keys.data_ptr() == before


def test_which_models_rows_can_join() -> None:
    assert rows_can_join(LlamaConfig())
    assert rows_can_join(MistralConfig(sliding_window=8))
    assert rows_can_join(Gemma2Config())
    assert not rows_can_join(Llama4TextConfig()), "chunks begin at columns of their own"
    assert not rows_can_join(Qwen3NextConfig()), "a recurrent state cannot be shifted"
