"""The losses, each a function of the target logprobs alone.

Notation: lp is the target logprob under the model being trained (temperature 1, the whole
vocabulary), q the sampler's logprob, A the advantage, w the weight, r = exp(lp - q). Losses
are sums over tokens and datums, never means; every one is elementwise, which is what lets
the engine go through the vocabulary projection in chunks.

    cross_entropy        -w * lp
    importance_sampling  -r * A
    ppo                  -min(r * A, clip(r, low, high) * A)          low 0.8, high 1.2
    cispo                -stopgrad(clip(r, low, high)) * lp * A       low 0.0, high 4.0
    dro                  -(lp * A - beta / 2 * (lp - q)^2)            beta must be given

The clip thresholds are absolute ratios; a datum may carry them per token, under the same
names, and those win over the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from registry.errors import InvalidInput

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
_CLIPS = frozenset({"clip_low_threshold", "clip_high_threshold"})


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss by name.

    Fields:
        required, optional: float inputs of every datum, of the targets' shape.
        defaults: configuration; None marks a value that must be given.
        function: (lp, inputs, config) -> elementwise loss, of lp's shape.
    """

    name: str
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    defaults: Mapping[str, float | None] = field(default_factory=dict)
    function: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]

    def configure(self, raw: Mapping[str, Any]) -> dict[str, float]:
        """Check a loss_fn_config and fill in the defaults. Raises InvalidInput."""
        unknown = sorted(set(raw) - set(self.defaults))
        if unknown:
            known = ", ".join(sorted(self.defaults)) or "none"
            raise InvalidInput(
                f"loss_fn_config of {self.name} knows no {', '.join(map(repr, unknown))}; "
                f"its keys: {known}."
            )
        config: dict[str, float] = {}
        for key, default in self.defaults.items():
            value = raw.get(key, default)
            if value is None:
                raise InvalidInput(f"loss_fn_config of {self.name} must give {key!r}.")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidInput(f"loss_fn_config {key!r} must be a number, not {value!r}.")
            if not abs(value) < float("inf"):
                raise InvalidInput(f"loss_fn_config {key!r} must be finite, not {value!r}.")
            config[key] = float(value)
        low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
        if low is not None and high is not None and low > high:
            raise InvalidInput(f"clip_low_threshold {low} is above clip_high_threshold {high}.")
        return config


def loss_named(name: object) -> Loss:
    """The loss of this name. Raises InvalidInput that lists those there are."""
    if isinstance(name, str) and name in LOSSES:
        return LOSSES[name]
    raise InvalidInput(f"Unknown loss_fn {name!r}; there are {', '.join(sorted(LOSSES))}.")


def _cross_entropy(lp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    del config
    return -inputs["weights"] * lp


def _importance_sampling(lp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    del config
    return -torch.exp(lp - inputs["logprobs"]) * inputs["advantages"]


def _ppo(lp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio = torch.exp(lp - inputs["logprobs"])
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages)


def _cispo(lp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio = torch.exp(lp.detach() - inputs["logprobs"])
    return -_clip(ratio, inputs, config) * lp * inputs["advantages"]


def _dro(lp: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    gap = lp - inputs["logprobs"]
    return -(lp * inputs["advantages"] - 0.5 * config["beta"] * gap * gap)


def _clip(ratio: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    low, high = (
        inputs[name] if name in inputs else torch.full_like(ratio, config[name])
        for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return torch.clamp(ratio, low, high)


_POLICY = frozenset({"logprobs", "advantages"})

LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(
            name="cross_entropy",
            required=frozenset({"weights"}),
            function=_cross_entropy,
        ),
        Loss(
            name="importance_sampling",
            required=_POLICY,
            function=_importance_sampling,
        ),
        Loss(
            name="ppo",
            required=_POLICY,
            optional=_CLIPS,
            defaults={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            function=_ppo,
        ),
        Loss(
            name="cispo",
            required=_POLICY,
            optional=_CLIPS,
            defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
            function=_cispo,
        ),
        Loss(
            name="dro",
            required=_POLICY,
            defaults={"beta": None},
            function=_dro,
        ),
    )
}
