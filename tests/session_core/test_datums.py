from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from registry.errors import InvalidInput
from session_core.datums import Datums, read_datums
from session_core.operations import Operation, datum_arrays

Arrays = dict[str, np.ndarray[Any, Any]]


def read(arrays: Arrays, required: str = "weights") -> Datums:
    return read_datums(
        Operation(kind="forward", arrays=arrays),
        required=frozenset(required.split()),
        optional=frozenset({"clip_low_threshold"}),
        vocabulary=100,
        context=8,
    )


def arrays(
    tokens: list[int] | None = None,
    targets: Any = (2, 3, 4),
    weights: Any = (1, 1, 1),
    **more: Any,
) -> Arrays:
    inputs = {"target_tokens": [np.array(targets)], "weights": [np.array(weights, np.float32)]}
    inputs |= {name: [np.array(value)] for name, value in more.items()}
    return datum_arrays([np.array([1, 2, 3] if tokens is None else tokens, np.int64)], inputs)


def test_a_good_batch_is_taken_apart() -> None:
    datums = read(arrays())
    assert [row.tolist() for row in datums.tokens] == [[1, 2, 3]]
    assert [row.tolist() for row in datums.targets] == [[2, 3, 4]]
    assert datums.inputs["weights"][0].dtype == np.float32
    assert datums.lengths == [3]
    assert datums.token_count == 3


def test_soft_targets_are_two_dimensional() -> None:
    datums = read(arrays(targets=np.ones((3, 4), np.int64), weights=np.ones((3, 4))))
    assert datums.targets[0].shape == (3, 4)


def test_inputs_that_the_loss_does_not_read_are_let_pass() -> None:
    assert "advantages" not in read(arrays(advantages=[1.0, 2.0, 3.0])).inputs


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "no data"),
        (datum_arrays([], {"target_tokens": [], "weights": []}), "data is empty"),
        (arrays(tokens=[], targets=np.zeros(0, np.int64), weights=[]), "Datum 0 is empty"),
        (arrays(tokens=[1] * 9, targets=[1] * 9, weights=[1] * 9), "Datum 0 has 9 tokens"),
        (arrays(tokens=[1, 2, 100]), "token 100 is outside the vocabulary of 100"),
        (arrays(tokens=[1, 2, -1]), "token -1 is outside"),
        (arrays(targets=[1, 2, 100]), "target token 100 is outside"),
        (arrays(targets=[1, 2]), "2 target_tokens for 3 tokens"),
        (arrays(targets=[1.0, 2.0, 3.0]), "target_tokens must hold integers"),
        (arrays(targets=np.zeros((3, 0), np.int64)), r"\[N\] or \[N, K\]"),
        (arrays(weights=[1, 1]), "weights has shape"),
        (arrays(weights=[1, np.nan, 1]), "weights holds NaN"),
        (arrays(weights=[1, np.inf, 1]), "weights holds NaN or infinity"),
        (arrays(mask=[1, 1, 1]), "'mask' are not known"),
    ],
)
def test_wrong_batches_are_refused_by_name(bad: Arrays, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(bad)


def test_missing_inputs_are_named() -> None:
    with pytest.raises(InvalidInput, match="'advantages', 'logprobs'"):
        read(arrays(), required="advantages logprobs")


def test_an_input_must_be_in_every_datum() -> None:
    two = datum_arrays(
        [np.array([1]), np.array([2])],
        {"target_tokens": [np.array([1]), np.array([2])], "weights": [np.ones(1)]},
    )
    with pytest.raises(InvalidInput, match="weights is in 1 of 2 datums"):
        read(two)


def test_an_input_without_offsets_is_refused() -> None:
    broken = arrays()
    del broken["input.weights.offsets"]
    with pytest.raises(InvalidInput, match="weights has no offsets"):
        read(broken)


def test_floats_as_tokens_are_refused() -> None:
    broken = arrays()
    broken["tokens"] = broken["tokens"].astype(np.float32)
    with pytest.raises(InvalidInput, match="tokens must hold integers"):
        read(broken)
