"""The datums of a forward or forward_backward operation, checked.

Everything a client can get wrong in them is refused here, by name, before any tensor is
made: after this the engine may trust lengths, ranges and finiteness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from registry.errors import InvalidInput
from session_core.operations import Array, Operation, split

IGNORED_INPUTS = frozenset({"weights", "advantages", "logprobs", "sequence_ratio_mask"})
"""Inputs a datum may carry though its loss does not read them."""


@dataclass(frozen=True, kw_only=True)
class Datums:
    """A checked batch.

    Fields:
        tokens: int64 [length] a datum, each in [0, vocabulary).
        targets: int64 [length] or [length, K] a datum.
        inputs: float32 arrays of the targets' shape a datum, by name.
    """

    tokens: list[Array]
    targets: list[Array]
    inputs: dict[str, list[Array]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each datum."""
        return [len(row) for row in self.tokens]

    @property
    def token_count(self) -> int:
        """Tokens of all datums."""
        return sum(self.lengths)


def read_datums(
    operation: Operation,
    *,
    required: frozenset[str],
    optional: frozenset[str],
    vocabulary: int,
    context: int,
) -> Datums:
    """Check an operation's arrays and take them apart.

    `required` and `optional` name the loss's float inputs beside target_tokens. Raises
    InvalidInput naming the datum, the input, and what is wrong with it.
    """
    arrays = operation.arrays
    if "tokens" not in arrays or "tokens.offsets" not in arrays:
        raise InvalidInput("The operation has no data: give at least one datum.")
    tokens = split(_integers("tokens", arrays["tokens"]), arrays["tokens.offsets"])
    if not tokens:
        raise InvalidInput("The data is empty: give at least one datum.")
    for index, row in enumerate(tokens):
        if not 1 <= len(row) <= context:
            problem = "is empty" if len(row) == 0 else f"has {len(row)} tokens"
            raise InvalidInput(f"Datum {index} {problem}; the context holds 1 to {context} tokens.")
        _in_vocabulary(f"Datum {index}", "token", row, vocabulary)

    found = {name[6:] for name in arrays if name.startswith("input.") and "offsets" not in name}
    unknown = found - required - optional - IGNORED_INPUTS - {"target_tokens"}
    if unknown:
        raise InvalidInput(f"Loss inputs {_names(unknown)} are not known to this loss.")
    missing = (required | {"target_tokens"}) - found
    if missing:
        raise InvalidInput(f"The loss needs the inputs {_names(missing)} in every datum.")

    targets = _rows(arrays, "target_tokens", len(tokens))
    targets = [_integers("target_tokens", row) for row in targets]
    for index, (row, target) in enumerate(zip(tokens, targets, strict=True)):
        if target.ndim not in (1, 2) or (target.ndim == 2 and target.shape[1] == 0):
            raise InvalidInput(f"Datum {index}: target_tokens must be [N] or [N, K].")
        if len(target) != len(row):
            raise InvalidInput(
                f"Datum {index}: {len(target)} target_tokens for {len(row)} tokens; "
                "there must be as many."
            )
        _in_vocabulary(f"Datum {index}", "target token", target, vocabulary)

    inputs: dict[str, list[Array]] = {}
    for name in sorted((required | optional) & found):
        rows = [np.asarray(row, dtype=np.float32) for row in _rows(arrays, name, len(tokens))]
        for index, (row, target) in enumerate(zip(rows, targets, strict=True)):
            if row.shape != target.shape:
                raise InvalidInput(
                    f"Datum {index}: {name} has shape {list(row.shape)}, target_tokens "
                    f"{list(target.shape)}; they must be equal."
                )
            if not np.isfinite(row).all():
                raise InvalidInput(f"Datum {index}: {name} holds NaN or infinity.")
        inputs[name] = rows
    return Datums(tokens=tokens, targets=targets, inputs=inputs)


def _rows(arrays: object, name: str, count: int) -> list[Array]:
    assert hasattr(arrays, "get")
    offsets = arrays.get(f"input.{name}.offsets")
    if offsets is None:
        raise InvalidInput(f"Loss input {name} has no offsets.")
    rows = split(arrays.get(f"input.{name}"), offsets)
    if len(rows) != count:
        raise InvalidInput(f"Loss input {name} is in {len(rows)} of {count} datums.")
    return rows


def _integers(name: str, array: Array) -> Array:
    if array.dtype.kind not in "iu":
        raise InvalidInput(f"{name} must hold integers, not {array.dtype}.")
    return array.astype(np.int64)


def _in_vocabulary(where: str, what: str, array: Array, vocabulary: int) -> None:
    if array.size and (int(array.min()) < 0 or int(array.max()) >= vocabulary):
        bad = array[(array < 0) | (array >= vocabulary)].flat[0]
        raise InvalidInput(f"{where}: {what} {bad} is outside the vocabulary of {vocabulary}.")


def _names(names: set[str] | frozenset[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
