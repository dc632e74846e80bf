from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import InvalidInput
from session_core.operations import (
    Operation,
    Result,
    datum_arrays,
    decode,
    decode_result,
    encode,
    ragged,
    split,
)


def test_an_operation_survives_its_bytes() -> None:
    operation = Operation(
        kind="forward",
        params={"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.8}, "none": None},
        arrays={"tokens": np.arange(5, dtype=np.int32), "x": np.ones((2, 3), np.float32)},
    )
    back = decode(encode(operation))
    assert back.kind == operation.kind
    assert back.params == operation.params
    assert set(back.arrays) == set(operation.arrays)
    for name, array in operation.arrays.items():
        assert back.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(back.arrays[name], array)


def test_equal_operations_have_equal_bytes() -> None:
    one = Operation(kind="k", params={"a": 1, "b": 2}, arrays={"x": np.ones(2), "y": np.ones(3)})
    two = Operation(kind="k", params={"b": 2, "a": 1}, arrays={"y": np.ones(3), "x": np.ones(2)})
    assert encode(one) == encode(two)


def test_strided_arrays_keep_their_values() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T[::2]
    back = decode(encode(Operation(kind="k", arrays={"x": array})))
    np.testing.assert_array_equal(back.arrays["x"], array)


def test_a_result_survives_its_bytes() -> None:
    result = Result(params={"metrics": {"loss:sum": 0.1 + 0.2}}, arrays={"x": np.zeros(0)})
    back = decode_result(encode(result))
    assert back.params == {"metrics": {"loss:sum": 0.1 + 0.2}}
    assert back.arrays["x"].shape == (0,)


def test_operations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Operation(kind="k").kind = "other"  # type: ignore[misc]


@pytest.mark.parametrize("value", [{1, 2}, b"x"])
def test_parameters_that_json_cannot_carry_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="finite JSON"):
        encode(Operation(kind="k", params={"x": value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("nested", "name"), [(False, "x"), (True, "x.y")])
def test_a_parameter_that_is_not_finite_is_refused_by_name(
    value: float, nested: bool, name: str
) -> None:
    with pytest.raises(InvalidInput, match=f"{name} is {value}: it must be finite"):
        encode(Operation(kind="k", params={"x": {"y": value} if nested else value}))


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\xff" * 64])
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="Not the bytes"):
        decode(data)


def test_a_truncated_operation_and_a_result_are_not_operations() -> None:
    whole = encode(Operation(kind="k", arrays={"x": np.ones(3)}))
    with pytest.raises(InvalidInput, match="Not the bytes"):
        decode(whole[:-1])
    with pytest.raises(InvalidInput, match="names no kind"):
        decode(encode(Result()))


@given(st.binary(max_size=200))
def test_no_bytes_get_past_the_one_error(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(data)


@given(st.lists(st.lists(st.integers(-9, 9), max_size=6), max_size=8))
def test_ragged_and_split_undo_each_other(rows: list[list[int]]) -> None:
    arrays = [np.array(row, np.int32) for row in rows]
    flat, offsets = ragged(arrays)
    assert offsets.dtype == np.int64
    back = split(flat, offsets)
    assert len(back) == len(arrays)
    for one, two in zip(back, arrays, strict=True):
        np.testing.assert_array_equal(one, two)


def test_ragged_keeps_inner_dimensions() -> None:
    flat, offsets = ragged([np.ones((2, 3)), np.ones((1, 3))])
    assert flat.shape == (3, 3)
    assert [row.shape for row in split(flat, offsets)] == [(2, 3), (1, 3)]
    with pytest.raises(InvalidInput, match="dimensions"):
        ragged([np.ones((2, 3)), np.ones((1, 4))])


@pytest.mark.parametrize("offsets", [[], [1, 4], [0, 3], [0, 3, 2, 4], [[0, 4]]])
def test_offsets_that_do_not_divide_are_refused(offsets: list[int]) -> None:
    with pytest.raises(InvalidInput, match="Offsets"):
        split(np.zeros(4), np.array(offsets, np.int64))


def test_datum_arrays_pairs_every_array_with_offsets() -> None:
    arrays = datum_arrays([np.arange(2), np.arange(3)], {"weights": [np.ones(2), np.ones(3)]})
    assert set(arrays) == {"tokens", "tokens.offsets", "input.weights", "input.weights.offsets"}
    assert arrays["tokens"].dtype == np.int32
    assert arrays["input.weights.offsets"].tolist() == [0, 2, 5]
