"""The base model in memory: one copy, frozen, and what the engine asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merge import load_base, load_tokenizer
from session_core.attention import use_grouped_attention

_PROBE_TOKENS = 8
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class Base:
    """A causal language model and its tokenizer.

    Fields:
        model: the transformers model, in eval mode, no parameter trainable.
        tokenizer: its tokenizer.
        vocabulary: rows of the input embedding; token ids are below it.
        context: positions the model can hold.
        eos: token ids that end a text.
        plain_head: whether logits are just the output embedding of the last hidden state,
            so that it may be applied to chosen positions alone. False for models that cap or
            scale their logits.
    """

    model: Any
    tokenizer: Any
    vocabulary: int
    context: int
    eos: frozenset[int]
    plain_head: bool

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def head(self) -> Any:
        """The output embedding: a Linear, or the LoRA layer around it."""
        return self.model.get_output_embeddings()

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Last hidden states [B, T, H] of right-padded tokens [B, T].

        No mask is needed: what follows a position cannot reach it, so padding at the right
        changes no real position.
        """
        output = self.model.base_model(input_ids=tokens, use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of right-padded tokens [B, T]."""
        logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def prompt_positions(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        *,
        whole: bool,
    ) -> torch.Tensor:
        """What `position_logits` turns into logits, of left-padded prompts [B, T].

        Fills the cache. With `whole` False only the last position need be there.
        """
        inputs = {
            "input_ids": tokens,
            "attention_mask": None if bool(mask.all()) else mask,
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
        }
        result: torch.Tensor
        if self.plain_head:
            result = self.model.base_model(**inputs).last_hidden_state
        else:
            result = self.model(**inputs, logits_to_keep=0 if whole else 1).logits
        return result

    def position_logits(self, positions: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of chosen positions [N, ...] of `prompt_positions`."""
        if not self.plain_head:
            return positions
        logits: torch.Tensor = self.head(positions)
        return logits

    def next_logits(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """Logits [B, V], float32, after one more token [B, 1] a row."""
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special tokens stripped."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def open_base(folder: Path, *, device: str = "cpu") -> Base:
    """Load a model folder: fp32 on CPU, bf16 elsewhere.

    Raises InvalidInput when the folder is not a complete model.
    """
    model = load_base(folder, device=device)
    model.requires_grad_(False)
    use_grouped_attention(model)
    tokenizer = load_tokenizer(folder)
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT
    return Base(
        model=model,
        tokenizer=tokenizer,
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        context=int(context),
        eos=_eos(model, tokenizer),
        plain_head=_head_is_plain(model),
    )


def _eos(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    sources = (
        getattr(model.generation_config, "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    for source in sources:
        if source is not None:
            found.update(source if isinstance(source, list) else [source])
    return frozenset(int(token) for token in found)


@torch.no_grad()
def _head_is_plain(model: Any) -> bool:
    """Compare the model's own logits with its output embedding applied by hand."""
    head = model.get_output_embeddings()
    inner = model.base_model
    if not isinstance(head, nn.Linear) or inner is model:
        return False
    vocabulary = model.get_input_embeddings().num_embeddings
    device = next(model.parameters()).device
    # Spread over the vocabulary, so that some logits are large enough for a cap to show.
    tokens = (torch.arange(_PROBE_TOKENS, device=device) * (vocabulary // _PROBE_TOKENS))[None]
    own = model(input_ids=tokens, use_cache=False).logits
    hidden = inner(input_ids=tokens, use_cache=False).last_hidden_state
    if hidden.shape[-1] != head.in_features:
        return False
    return bool(torch.allclose(own.float(), head(hidden).float(), rtol=1e-4, atol=1e-4))
