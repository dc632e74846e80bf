from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from session_core.model import Base, open_base


def test_a_folder_is_opened_frozen_and_in_fp32(base: Base) -> None:
    assert (base.vocabulary, base.context, base.eos) == (384, 256, frozenset({2}))
    assert base.plain_head
    assert not base.model.training
    for parameter in base.model.parameters():
        assert parameter.dtype == torch.float32
        assert not parameter.requires_grad


def test_hidden_states_through_the_head_are_the_logits(tiny_base: Path) -> None:
    base = open_base(tiny_base)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    expected = AutoModelForCausalLM.from_pretrained(tiny_base)(tokens).logits
    with torch.no_grad():
        torch.testing.assert_close(base.head(base.hidden(tokens)), expected)
        torch.testing.assert_close(base.logits(tokens), expected)


def test_padding_at_the_right_reaches_no_real_position(base: Base) -> None:
    short, long = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7, 0, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(base.hidden(short), base.hidden(long)[:, :3])


@pytest.mark.parametrize("text", ["what is one plus two?", "ünïcode ☃"])
def test_decoding_gives_the_text_back_without_special_tokens(base: Base, text: str) -> None:
    tokens = base.tokenizer.encode(f"<|im_start|>{text}<|im_end|>")
    assert base.decode(tokens) == text
