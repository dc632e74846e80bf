from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import InvalidInput
from session_core.hints import lr_ratio_of


@pytest.mark.parametrize(("raw", "ratio"), [(16, 16.0), (0.5, 0.5), ("16", 16.0), ("1e2", 100.0)])
def test_a_number_or_its_text_is_taken(raw: object, ratio: float) -> None:
    assert lr_ratio_of({"loraplus_lr_ratio": raw, "team": "x"}) == ratio


def test_silent_metadata_asks_for_nothing() -> None:
    assert lr_ratio_of({}) is None
    assert lr_ratio_of({"loraplus_lr_ratio": None, "loraplus": 3}) is None


@pytest.mark.parametrize("raw", [0, -1, "0", "much", "", True, [16], {}, "nan", "inf", 10**400])
def test_anything_else_is_refused_by_name(raw: object) -> None:
    with pytest.raises(InvalidInput, match="loraplus_lr_ratio is the learning rate"):
        lr_ratio_of({"loraplus_lr_ratio": raw})


@given(st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False))
def test_a_number_and_its_text_mean_the_same(ratio: float) -> None:
    assert lr_ratio_of({"loraplus_lr_ratio": repr(ratio)}) == ratio
