"""Attention for decoding, without a copy of the keys for every head that shares them.

With one query a row, the heads that share a key head can stand as that head's queries:
[B, Hq, 1, D] is read as [B, Hk, Hq / Hk, D], and the same scaled dot products come out.
transformers copies keys and values for every query head instead, at every token, which on a
CPU is most of the time of a decoding step. Whatever is not such a step is left to it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "slipway_sdpa"
_UNDERSTOOD = frozenset({"position_ids", "cache_position", "use_cache", "sliding_window"})
"""Arguments that say nothing which the mask does not say already."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries [B, Hq, T, D] over keys and values [B, Hk, S, D]: [B, T, Hq, D]."""
    rows, heads, count, width = query.shape
    shared = key.shape[1]
    plain = not dropout and not any(
        value is not None for name, value in kwargs.items() if name not in _UNDERSTOOD
    )
    if count != 1 or heads == shared or not plain:
        whole: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return whole
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, shared, heads // shared, width),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def use_grouped_attention(model: Any) -> None:
    """Have a model that uses transformers' "sdpa" attention decode this way."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
