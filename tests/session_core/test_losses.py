"""Each loss and its gradient against formulas worked by hand in float64 numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from registry.errors import InvalidInput
from session_core.losses import LOSSES, loss_named

Vector = np.ndarray[Any, Any]
RNG = np.random.default_rng(7)
LP = -RNG.random(50) * 8
Q = LP + RNG.standard_normal(50) * 0.5
A = RNG.standard_normal(50)
W = RNG.standard_normal(50)


def evaluate(
    name: str, config: dict[str, float], lp: Vector = LP, **inputs: Vector
) -> tuple[Vector, Vector]:
    loss = loss_named(name)
    leaf = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    given = {key: torch.tensor(value, dtype=torch.float64) for key, value in inputs.items()}
    value = loss.function(leaf, given, loss.configure(config))
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach().numpy(), gradient.numpy()


def test_cross_entropy() -> None:
    value, gradient = evaluate("cross_entropy", {}, weights=W)
    np.testing.assert_allclose(value, -W * LP)
    np.testing.assert_allclose(gradient, -W)


def test_importance_sampling() -> None:
    value, gradient = evaluate("importance_sampling", {}, logprobs=Q, advantages=A)
    ratio = np.exp(LP - Q)
    np.testing.assert_allclose(value, -ratio * A)
    np.testing.assert_allclose(gradient, -ratio * A)


@pytest.mark.parametrize(("low", "high"), [(0.8, 1.2), (0.5, 3.0), (0.0, 0.1)])
def test_ppo(low: float, high: float) -> None:
    config = {"clip_low_threshold": low, "clip_high_threshold": high}
    value, gradient = evaluate("ppo", config, logprobs=Q, advantages=A)
    ratio = np.exp(LP - Q)
    np.testing.assert_allclose(value, -np.minimum(ratio * A, np.clip(ratio, low, high) * A))
    # The clipped branch has no slope; it acts above for A > 0 and below for A < 0.
    clipped = np.where(A > 0, ratio > high, ratio < low)
    np.testing.assert_allclose(gradient, np.where(clipped, 0, -ratio * A))


@pytest.mark.parametrize(("low", "high"), [(0.0, 4.0), (0.8, 1.2)])
def test_cispo(low: float, high: float) -> None:
    config = {"clip_low_threshold": low, "clip_high_threshold": high}
    value, gradient = evaluate("cispo", config, logprobs=Q, advantages=A)
    clipped = np.clip(np.exp(LP - Q), low, high)
    np.testing.assert_allclose(value, -clipped * LP * A)
    np.testing.assert_allclose(gradient, -clipped * A)


def test_dro() -> None:
    value, gradient = evaluate("dro", {"beta": 0.3}, logprobs=Q, advantages=A)
    np.testing.assert_allclose(value, -(LP * A - 0.15 * (LP - Q) ** 2))
    np.testing.assert_allclose(gradient, -(A - 0.3 * (LP - Q)))


def test_defaults_are_those_of_the_wire() -> None:
    assert loss_named("ppo").configure({}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.2,
    }
    assert loss_named("cispo").configure({}) == {
        "clip_low_threshold": 0.0,
        "clip_high_threshold": 4.0,
    }


def test_on_policy_all_policy_losses_have_the_same_gradient() -> None:
    for name in ("importance_sampling", "ppo", "cispo"):
        _, gradient = evaluate(name, {}, logprobs=LP, advantages=A)
        np.testing.assert_allclose(gradient, -A, err_msg=name)


@pytest.mark.parametrize("edge", [0.8, 1.2])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ppo_exactly_on_a_bound_is_not_clipped_in_value(edge: float, sign: float) -> None:
    value, _ = evaluate(
        "ppo",
        {},
        lp=np.array([math.log(edge)]),
        logprobs=np.zeros(1),
        advantages=np.array([sign]),
    )
    np.testing.assert_allclose(value, -edge * sign)


def test_thresholds_of_a_token_win_over_the_configuration() -> None:
    low, high = np.full(50, 0.9), np.full(50, 1.1)
    own, slope = evaluate(
        "ppo", {}, logprobs=Q, advantages=A, clip_low_threshold=low, clip_high_threshold=high
    )
    same, same_slope = evaluate(
        "ppo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        logprobs=Q,
        advantages=A,
    )
    np.testing.assert_array_equal(own, same)
    np.testing.assert_array_equal(slope, same_slope)


def test_unknown_losses_are_refused_with_those_there_are() -> None:
    for name in ("gspo", None, 3, "CROSS_ENTROPY"):
        with pytest.raises(InvalidInput, match="cispo, cross_entropy, dro"):
            loss_named(name)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("cross_entropy", {"beta": 1}, "knows no 'beta'; its keys: none"),
        ("ppo", {"clip": 1}, "clip_high_threshold, clip_low_threshold"),
        ("ppo", {"clip_low_threshold": "0.8"}, "must be a number"),
        ("ppo", {"clip_low_threshold": True}, "must be a number"),
        ("ppo", {"clip_low_threshold": float("nan")}, "must be finite"),
        ("ppo", {"clip_low_threshold": 2.0}, "above clip_high_threshold"),
        ("dro", {}, "must give 'beta'"),
    ],
)
def test_wrong_configurations_are_refused(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loss_named(name).configure(config)


def test_every_loss_is_found_by_its_own_name() -> None:
    assert all(name == loss.name for name, loss in LOSSES.items())
