"""Adam as the wire specifies it: decoupled weight decay, clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from registry.errors import Corrupt, InvalidInput
from session_core.hints import check_lr_ratio

_MOMENTS = ("exp_avg", "exp_avg_sq")


def global_norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """The norm of all gradients as one vector; not finite if any of them, or it, is not."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """One step's hyper-parameters; schedules live with the client.

    grad_clip_norm 0 means no clipping.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> AdamParams:
        """Check an operation's parameters. Raises InvalidInput naming the wrong one."""
        names = {item.name for item in fields(cls)}
        unknown = sorted(set(raw) - names)
        if unknown:
            raise InvalidInput(f"Unknown Adam parameters: {', '.join(unknown)}.")
        values: dict[str, float] = {}
        for name, value in raw.items():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidInput(f"Adam's {name} must be a number, not {value!r}.")
            below_one = not name.startswith("beta") or value < 1
            if not math.isfinite(value) or value < 0 or not below_one:
                limit = "in [0, 1)" if name.startswith("beta") else "finite and not negative"
                raise InvalidInput(f"Adam's {name} must be {limit}, not {value}.")
            values[name] = float(value)
        return cls(**values)

    def describe(self) -> dict[str, float]:
        """As JSON parameters."""
        return asdict(self)


class Adam:
    """torch's AdamW over one adapter's named parameters, with a state that can be saved.

    `lr_ratio` is LoRA+'s: the learning rate of the B matrices over that of all else.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, lr_ratio: float = 1.0) -> None:
        self.lr_ratio = check_lr_ratio(lr_ratio)
        self._parameters = dict(parameters)
        groups = [
            {"params": [p for name, p in parameters.items() if (".lora_B." in name) == outer]}
            for outer in (False, True)
        ]
        self._adam = torch.optim.AdamW(groups, foreach=False)
        self.steps = 0

    def step(self, gradients: Mapping[str, torch.Tensor], params: AdamParams) -> float:
        """Take one step; returns the gradient's global norm before clipping.

        A parameter without a gradient is taken to have a zero one, so that the moments of
        all parameters age alike. Raises InvalidInput, and takes no step, when the norm is
        not finite.
        """
        norm = global_norm(gradients)
        if not math.isfinite(norm):
            raise InvalidInput("The accumulated gradient is not finite; it was dropped.")
        for name, parameter in self._parameters.items():
            gradient = gradients.get(name)
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        if params.grad_clip_norm > 0:
            nn.utils.clip_grad_norm_(list(self._parameters.values()), params.grad_clip_norm)
        ratios = (1.0, self.lr_ratio)
        for group, ratio in zip(self._adam.param_groups, ratios, strict=True):
            group["lr"] = params.learning_rate * ratio
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.steps += 1
        return norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Both moments of each parameter, as `exp_avg.<name>` and `exp_avg_sq.<name>`.

        Zeros before the first step, which is what they are.
        """
        result: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._adam.state.get(parameter, {})
            for moment in _MOMENTS:
                tensor = state.get(moment)
                result[f"{moment}.{name}"] = (
                    torch.zeros_like(parameter.detach()) if tensor is None else tensor
                )
        return result

    def load(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take up a saved state. Raises Corrupt when it does not fit the parameters."""
        expected = {f"{moment}.{name}" for moment in _MOMENTS for name in self._parameters}
        if set(tensors) != expected:
            odd = min(set(tensors) ^ expected)
            raise Corrupt(f"The optimizer state does not fit the adapter: see {odd}.")
        for name, parameter in self._parameters.items():
            for moment in _MOMENTS:
                if tensors[f"{moment}.{name}"].shape != parameter.shape:
                    raise Corrupt(f"The optimizer state of {name} has another shape.")
        self.steps = steps
        if steps == 0:
            return
        for name, parameter in self._parameters.items():
            state = self._adam.state[parameter]
            state["step"] = torch.tensor(float(steps))
            for moment in _MOMENTS:
                state[moment] = tensors[f"{moment}.{name}"].to(parameter).clone()
