"""Grouped attention against transformers' own, on models and on bare tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from session_core.attention import NAME, grouped_attention
from session_core.model import Base


class Layer(torch.nn.Module):
    """What an attention layer tells of itself."""

    num_key_value_groups = 4
    is_causal = True


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_it_computes_what_transformers_does(masked: bool, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 8, count, 16, generator=generator)
    key, value = torch.randn(2, 3, 2, 9, 16, generator=generator)
    mask = torch.ones(3, 1, count, 9, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[0, :, :, :4] = False
        mask[1, :, :, :1] = False
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    found, _ = grouped_attention(Layer(), query, key, value, mask, scaling=0.3)
    assert found.shape == expected.shape == (3, count, 8, 16)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_it_does_not_understand_is_left_to_transformers() -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, 1, 8, generator=generator)
    key, value = torch.randn(2, 2, 1, 6, 8, generator=generator)
    bias = torch.randn(2, 4, 1, 6, generator=generator)
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, None, position_bias=bias)
    found, _ = grouped_attention(Layer(), query, key, value, None, position_bias=bias)
    assert torch.equal(found, expected)


def test_a_model_decodes_alike_and_trains_to_the_last_bit(base: Base, tiny_base: Path) -> None:
    assert base.model.config._attn_implementation == NAME
    plain = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32).eval()
    tokens = torch.arange(3, 43).reshape(2, 20)
    assert torch.equal(base.logits(tokens), plain(tokens).logits)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    scores = []
    for model in (base.model, plain):
        cache = DynamicCache()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache)
        longer = torch.nn.functional.pad(mask, (0, 1), value=1)
        output = model(
            tokens[:, :1],
            attention_mask=longer,
            position_ids=positions[:, -1:] + 1,
            past_key_values=cache,
        )
        scores.append(output.logits)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)
