"""Choosing the next token of each row from its logits.

Each row has its own random stream, and how its token is computed depends on its own request
alone, so company in a batch does not change what a seed means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from session_core.operations import Array
from session_core.requests import SampleRequest


def choose(
    logits: torch.Tensor,
    requests: Sequence[SampleRequest],
    streams: Sequence[np.random.Generator],
) -> tuple[list[int], list[float]]:
    """Next tokens and their logprobs, one a row of the logits [B, V] (float32).

    The logprobs are the model's own: untempered, over the whole vocabulary.
    """
    tokens = logits.argmax(dim=-1)
    plain = [row for row, item in enumerate(requests) if item.temperature and not _filters(item)]
    cut = [row for row, item in enumerate(requests) if item.temperature and _filters(item)]
    for rows, filtered in ((plain, False), (cut, True)):
        if not rows:
            continue
        chosen = [requests[row] for row in rows]
        draws = [streams[row].random() for row in rows]
        tokens[rows] = _draw(logits[rows], chosen, draws, filtered=filtered)
    logprobs = logits.gather(1, tokens[:, None]) - torch.logsumexp(logits, dim=-1, keepdim=True)
    return tokens.tolist(), logprobs[:, 0].tolist()


def draw_alternatives(scores: torch.Tensor, draws: Array, *, temperature: float) -> torch.Tensor:
    """Tokens [P, k] drawn at each position from logprobs [P, V], with replacement.

    `draws` are uniform in [0, 1), [P, k]; temperature 0 gives the likeliest token.
    """
    if not temperature:
        return scores.argmax(dim=-1, keepdim=True).expand(-1, draws.shape[1])
    cumulative = torch.softmax(scores.double() / temperature, dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    points = torch.from_numpy(draws).to(cumulative.device) * total
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points, right=True)


def _filters(request: SampleRequest) -> bool:
    return request.top_k > 0 or request.top_p < 1


def _draw(
    logits: torch.Tensor,
    requests: Sequence[SampleRequest],
    draws: Sequence[float],
    *,
    filtered: bool,
) -> torch.Tensor:
    """One token a row by inverting the cumulative distribution at the row's draw."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    tempered = logits.double() / column([item.temperature for item in requests])
    order = None
    if filtered:
        tempered, order = torch.sort(tempered, dim=-1, descending=True, stable=True)
    weights = torch.softmax(tempered, dim=-1)
    if filtered:
        size = weights.shape[1]
        rank = torch.arange(size, device=logits.device)[None]
        top_k = column([item.top_k or size for item in requests])
        weights = torch.where(rank < top_k, weights, 0.0)
        # A token stays while those before it do not yet make up top_p of what top_k left.
        before = weights.cumsum(dim=-1) - weights
        top_p = column([item.top_p for item in requests])
        limit = top_p * weights.sum(dim=-1, keepdim=True)
        weights = torch.where((before < limit) | (rank == 0), weights, 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Below the total, lest rounding pick a token of no weight behind the last real one.
    point = torch.minimum(column(draws) * total, torch.nextafter(total, torch.zeros_like(total)))
    picks = torch.searchsorted(cumulative, point, right=True)
    if order is not None:
        picks = order.gather(1, picks)
    return picks[:, 0]
