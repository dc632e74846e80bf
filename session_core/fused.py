"""A LoRA layer's own part, added to the base layer's output in place.

PEFT computes result + B(A(x)) * scale with three passes over the output in each direction;
on a CPU that is memory traffic of the same order as the products themselves. Here the last
product accumulates into the output, and the scale falls on the narrow side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import LoraVariant


@dataclass(kw_only=True)
class RowMap:
    """Which rows of a batch are whose: None gives every active adapter the whole batch."""

    rows: Mapping[str, torch.Tensor] | None = None
    """Indices along the first dimension, by adapter; one that is not named has no row."""


class FusedLora(LoraVariant):
    """Takes the place of PEFT's plain LoRA forward, layer by layer and adapter by adapter."""

    def __init__(self, owners: RowMap) -> None:
        self._owners = owners

    def forward(
        self,
        module: Any,
        active_adapter: str,
        x: torch.Tensor,
        result: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The base layer's `result` [..., out] with the adapter's part of `x` [..., in]."""
        del kwargs
        a = module.lora_A[active_adapter].weight
        b = module.lora_B[active_adapter].weight
        scale = module.scaling[active_adapter]
        if self._owners.rows is not None:
            rows = self._owners.rows.get(active_adapter)
            if rows is None:
                return result
            narrow = torch.nn.functional.linear(x[rows], a) * scale
            own = torch.nn.functional.linear(narrow, b).to(result.dtype)
            return result.index_add(0, rows, own)
        if result.dtype != b.dtype or result._is_view() or not result.is_contiguous():
            # A base of another precision, or an output whose memory is another tensor's.
            narrow = torch.nn.functional.linear(x, a)
            return result + torch.nn.functional.linear(narrow, b) * scale
        fused: torch.Tensor = _AddLora.apply(result, x, a, b, scale)
        return fused


class _AddLora(torch.autograd.Function):
    """result += scale * (x A^T) B^T."""

    @staticmethod
    def forward(
        ctx: Any,
        result: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        inputs = x.reshape(-1, x.shape[-1])
        narrow = inputs @ a.T
        result.view(-1, result.shape[-1]).addmm_(narrow, b.T, alpha=scale)
        ctx.mark_dirty(result)
        ctx.save_for_backward(inputs, narrow, a, b)
        ctx.scale = scale
        ctx.shape = x.shape
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, narrow, a, b = ctx.saved_tensors
        needs_x, needs_a, needs_b = ctx.needs_input_grad[1:4]
        flat = grad.reshape(-1, grad.shape[-1])
        through = (flat @ b).mul_(ctx.scale) if needs_x or needs_a else None
        grad_x = grad_a = grad_b = None
        if through is not None and needs_x:
            grad_x = (through @ a).view(ctx.shape)
        if through is not None and needs_a:
            grad_a = through.T @ inputs
        if needs_b:
            grad_b = (flat.T @ narrow).mul_(ctx.scale)
        return grad, grad_x, grad_a, grad_b, None
