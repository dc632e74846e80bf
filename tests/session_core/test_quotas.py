from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import InvalidInput, QuotaExceeded, TooMany
from session_core import operations as op
from session_core.operations import Operation, datum_arrays
from session_core.quotas import (
    NAMES,
    Quota,
    check_limit,
    prompt_tokens,
    samples_of,
    sampling_tokens,
    training_tokens,
)


def sample(prompt: int, **params) -> Operation:
    tokens = np.zeros(prompt, np.int32)
    return Operation(kind=op.SAMPLE, params=params, arrays={"tokens": tokens})


def batch(*lengths: int, kind: str = op.FORWARD_BACKWARD) -> Operation:
    rows = [np.zeros(length, np.int32) for length in lengths]
    return Operation(kind=kind, arrays=datum_arrays(rows, {"target_tokens": rows}))


def test_no_limit_lets_everything_in():
    none = Quota(operations=None, samples=None)
    none.check_sessions(10**9)
    none.check_operations(10**9)
    none.check_samples(10**9, 10**9)
    none.check_tokens(10**15, 10**15)
    none.check_datums(batch(10**5))
    assert none.bounded(sample(10**5)).params == {}


def test_limits_are_reached_and_not_passed():
    quota = Quota(sessions=2, operations=3, samples=4, tokens_per_day=10, context=5)
    quota.check_sessions(1)
    quota.check_operations(2)
    quota.check_samples(1, 3)
    quota.check_tokens(4, 6)
    quota.check_datums(batch(5, 1))
    with pytest.raises(QuotaExceeded, match="2 sessions are active, of 2"):
        quota.check_sessions(2)
    with pytest.raises(TooMany, match="3 operations"):
        quota.check_operations(3)
    with pytest.raises(TooMany, match="2 samples of this tenant are under way"):
        quota.check_samples(2, 3)
    with pytest.raises(QuotaExceeded, match="num_samples is 5"):
        quota.check_samples(0, 5)
    with pytest.raises(QuotaExceeded, match="00:00 UTC"):
        quota.check_tokens(5, 6)
    with pytest.raises(QuotaExceeded, match="datum 1 has 6 tokens"):
        quota.check_datums(batch(5, 6))


def test_only_what_has_datums_is_held_to_the_context():
    Quota(context=1).check_datums(Operation(kind=op.OPTIM_STEP))
    Quota(context=1).check_datums(batch())


@given(st.integers(1, 60), st.one_of(st.none(), st.integers(0, 200)), st.integers(2, 100))
def test_a_bounded_request_never_leaves_the_context(prompt, asked, context):
    wanted = sample(prompt) if asked is None else sample(prompt, max_tokens=asked)
    if prompt >= context:
        with pytest.raises(QuotaExceeded, match=f"has {prompt} tokens"):
            Quota(context=context).bounded(wanted)
        return
    bounded = Quota(context=context).bounded(wanted).params["max_tokens"]
    assert prompt + bounded <= context or bounded == asked == 0
    assert asked is None or bounded <= asked


def test_what_an_operation_is_billed_for():
    assert training_tokens(batch(3, 4)) == 7
    assert training_tokens(batch(3, kind=op.FORWARD)) == 3
    assert training_tokens(Operation(kind=op.OPTIM_STEP)) == 0
    assert sampling_tokens(sample(5, max_tokens=10, num_samples=4), 100) == 45
    assert sampling_tokens(sample(5, max_tokens=10**9, num_samples=2), 100) == 5 + 2 * 95
    assert sampling_tokens(sample(5), 100) == 100
    # What the engine will refuse is counted for something all the same.
    odd = sample(5, max_tokens="many", num_samples=-3)
    assert (samples_of(odd), prompt_tokens(odd), sampling_tokens(odd, 100)) == (1, 5, 100)


def test_limits_are_checked_by_name():
    assert check_limit("sessions", None) is None
    assert check_limit("sessions", 0) == 0
    for name, value, said in (
        ("hours", 1, "no limit 'hours'"),
        ("context", -1, "context is -1"),
        ("samples", 2**60, "samples is"),
    ):
        with pytest.raises(InvalidInput, match=said):
            check_limit(name, value)


def test_a_tenants_limits_replace_the_servers():
    quota = Quota(sessions=1, samples=2).with_limits({"sessions": None, "context": 8})
    assert quota == Quota(sessions=None, samples=2, context=8)
    assert set(NAMES) == {"sessions", "operations", "samples", "tokens_per_day", "context"}
