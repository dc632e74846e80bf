"""Target logprobs, and their gradient, without ever holding [batch, time, vocabulary].

The output embedding is a fifth of a small model's weights and its logits most of the
memory. So it is applied to real positions only, a chunk at a time, and its gradient, which
is known in closed form, is taken for those positions alone whose loss has one. Chunks are
cut by position and not by what the loss asks, so a forward and a forward_backward of the
same datums return the same logprobs to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from session_core.model import Base

CHUNK_LOGITS = {"cpu": 6 * 2**20, "cuda": 128 * 2**20}
"""Logits in memory at once. On a CPU small enough (24 MB) that the allocator reuses their
pages: fresh ones cost more than the arithmetic on them."""

Weigh = Callable[[slice, torch.Tensor], torch.Tensor]
"""(positions, logprobs [C, K]) -> gradient of the loss by those logprobs [C, K]."""


@dataclass(frozen=True, kw_only=True)
class HeadAdapter:
    """The trained low-rank part of the output embedding: x -> scale * B(A(x))."""

    a: torch.nn.Parameter  # [r, H]
    b: torch.nn.Parameter  # [V, r]
    scale: float


def score(
    base: Base,
    tokens: torch.Tensor,
    real: torch.Tensor,
    targets: torch.Tensor,
    *,
    weigh: Weigh | None = None,
    head_adapter: HeadAdapter | None = None,
) -> torch.Tensor:
    """Logprobs [P, K] of targets [P, K] at the P real positions of a micro-batch.

    Args:
        tokens: int64 [B, T], right-padded.
        real: bool [B, T], P of them true.
        targets: int64 [P, K], in the order of the real positions.
        weigh: given, gradients are accumulated into the active adapter's parameters.
        head_adapter: the active adapter's part of the output embedding, if it has one.
    """
    if not base.plain_head:
        return _score_whole(base, tokens, real, targets, weigh)
    with torch.set_grad_enabled(weigh is not None):
        hidden = base.hidden(tokens)[real]
    rows = hidden.detach()
    pull = torch.zeros_like(rows) if weigh is not None else None
    logprobs = torch.empty(targets.shape, dtype=torch.float32, device=rows.device)
    chunk = max(1, CHUNK_LOGITS.get(rows.device.type, CHUNK_LOGITS["cuda"]) // base.vocabulary)
    for start in range(0, len(rows), chunk):
        part = slice(start, min(start + chunk, len(rows)))
        with torch.no_grad():
            logits = base.head(rows[part]).float()
            # In place, from logits to unnormalised probabilities: no second buffer.
            target_logits = logits.gather(1, targets[part])
            top = logits.amax(dim=-1, keepdim=True)
            total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True)
            logprobs[part] = target_logits - top - total.log()
            if weigh is None or pull is None:
                continue
        grad = weigh(part, logprobs[part])
        with torch.no_grad():
            kept = (grad != 0).any(dim=-1).nonzero()[:, 0]
            if not len(kept):
                continue
            # d lp_k / d logits = onehot(k) - softmax, summed over k with its gradient.
            slope = logits[kept].mul_(-grad[kept].sum(dim=-1, keepdim=True) / total[kept])
            slope.scatter_add_(1, targets[part][kept], grad[kept])
            inputs = rows[part][kept]
            pull[start + kept] = _pull_back(base.head, slope, inputs, head_adapter)
    if pull is not None and hidden.requires_grad:
        torch.autograd.backward(hidden, pull)
    return logprobs


def _pull_back(
    head: Any, slope: torch.Tensor, inputs: torch.Tensor, adapter: HeadAdapter | None
) -> torch.Tensor:
    """Gradient by the head's inputs [R, H], given that by its outputs [R, V].

    Accumulates the gradients of the head's own adapter on the way.
    """
    weight = head.weight
    result = (slope.to(weight.dtype) @ weight).to(inputs.dtype)
    if adapter is None:
        return result
    x = inputs.to(adapter.a.dtype)
    through = slope @ adapter.b  # [R, r]
    _accumulate(adapter.b, (slope.T @ (x @ adapter.a.T)).mul_(adapter.scale))
    _accumulate(adapter.a, (through.T @ x).mul_(adapter.scale))
    return result + (through @ adapter.a).mul_(adapter.scale).to(result.dtype)


def _accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def _score_whole(
    base: Base,
    tokens: torch.Tensor,
    real: torch.Tensor,
    targets: torch.Tensor,
    weigh: Weigh | None,
) -> torch.Tensor:
    """The same through the model's own logits, for models that cap or scale them."""
    with torch.set_grad_enabled(weigh is not None):
        logits = base.logits(tokens)[real].float()
        norm = torch.logsumexp(logits, dim=-1, keepdim=True)
        logprobs = logits.gather(1, targets) - norm
    if weigh is not None:
        grad = weigh(slice(0, len(targets)), logprobs.detach())
        torch.autograd.backward(logprobs, grad)
    return logprobs.detach()
