"""How the rows of a batch are laid out in micro-batches. Pure; knows lengths only.

The layout is a function of the lengths alone, so that a replay computes the same matrix
products in the same shapes and gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

TOKEN_BUDGET = 4096
"""Padded tokens in a micro-batch, at most, unless one row alone is longer."""

OVERHEAD = 96
"""What one more micro-batch costs, in padded tokens that could be computed meanwhile."""


def micro_batches(
    lengths: Sequence[int], *, budget: int = TOKEN_BUDGET, overhead: int = OVERHEAD
) -> list[list[int]]:
    """Divide rows of these lengths into micro-batches: lists of row indices.

    Rows are sorted, longest first (ties by index), and cut where the sum of padded tokens
    and `overhead` for each micro-batch is least. So rows of like length share a micro-batch,
    and a batch of few tokens stays whole.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    count = len(order)
    best = [0] * (count + 1)  # least cost of the rows from here on
    cut = [count] * count
    for start in range(count - 1, -1, -1):
        longest = max(1, lengths[order[start]])
        rows = max(1, budget // longest)
        options = (
            ((end - start) * longest + overhead + best[end], -end)
            for end in range(start + 1, min(count, start + rows) + 1)
        )
        best[start], negative_end = min(options)
        cut[start] = -negative_end
    batches = []
    start = 0
    while start < count:
        batches.append(order[start : cut[start]])
        start = cut[start]
    return batches
