"""One pass of a batch through the base model and an adapter, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from registry.errors import InvalidInput
from session_core.datums import Datums
from session_core.layout import micro_batches
from session_core.lora import Adapters
from session_core.losses import Loss
from session_core.model import Base
from session_core.operations import Array
from session_core.projection import Weigh, score


def train_pass(
    base: Base,
    adapters: Adapters,
    slot: str,
    datums: Datums,
    loss: Loss,
    config: Mapping[str, float],
    *,
    backward: bool,
    progress: Callable[[], None],
) -> tuple[list[Array], float]:
    """Logprobs of each datum, and the summed loss; gradients land on the parameters.

    Args:
        progress: called before each micro-batch.

    Raises: InvalidInput: if a datum's loss is not finite, naming it.
    """
    adapters.use(slot)
    device = base.device
    logprobs: list[Array] = [np.empty(0, np.float32)] * len(datums.tokens)
    total = 0.0
    for rows in micro_batches(datums.lengths):
        progress()
        targets = _columns([datums.targets[row] for row in rows]).to(device)
        inputs = {
            name: _columns([values[row] for row in rows]).to(device)
            for name, values in datums.inputs.items()
        }
        weigh = _weigher(loss, inputs, config) if backward else None
        tokens, real = _pad([datums.tokens[row] for row in rows])
        scores = score(
            base,
            tokens.to(device),
            real.to(device),
            targets,
            weigh=weigh,
            head_adapter=adapters.head(slot),
        )
        losses = loss.function(scores, inputs, config)
        _check_finite(losses, rows, datums, loss)
        total += float(losses.double().sum())
        flat = scores.cpu().numpy()
        start = 0
        for row in rows:
            shape = datums.targets[row].shape
            logprobs[row] = flat[start : start + shape[0]].reshape(shape)
            start += shape[0]
    return logprobs, total


def prompt_logprobs(
    base: Base, adapters: Adapters, slot: str | None, prompts: list[Array]
) -> list[Array]:
    """Logprob of each token given those before it, float32; NaN at position 0."""
    adapters.use(slot)
    device = base.device
    results = [np.full(len(prompt), np.nan, np.float32) for prompt in prompts]
    long = [index for index, prompt in enumerate(prompts) if len(prompt) > 1]
    for batch in micro_batches([len(prompts[index]) - 1 for index in long]):
        chosen = [long[row] for row in batch]
        tokens, real = _pad([prompts[index][:-1].astype(np.int64) for index in chosen])
        targets = _columns([prompts[index][1:].astype(np.int64) for index in chosen])
        scores = score(base, tokens.to(device), real.to(device), targets.to(device))
        flat = scores[:, 0].cpu().numpy()
        start = 0
        for index in chosen:
            count = len(prompts[index]) - 1
            results[index][1:] = flat[start : start + count]
            start += count
    return results


def _check_finite(losses: torch.Tensor, rows: Sequence[int], datums: Datums, loss: Loss) -> None:
    wrong = (~torch.isfinite(losses)).any(dim=1)
    if not bool(wrong.any()):
        return
    place = int(wrong.nonzero()[0])
    for row in rows:
        if place < len(datums.tokens[row]):
            raise InvalidInput(
                f"Datum {row}: its {loss.name} loss is not finite at token {place}, as what was "
                "given there is too large, or too far from the model's own logprob. No gradient "
                "was added."
            )
        place -= len(datums.tokens[row])


def _weigher(loss: Loss, inputs: Mapping[str, torch.Tensor], config: Mapping[str, float]) -> Weigh:
    def weigh(part: slice, logprobs: torch.Tensor) -> torch.Tensor:
        leaf = logprobs.detach().clone().requires_grad_()
        here = {name: values[part] for name, values in inputs.items()}
        with torch.enable_grad():
            total = loss.function(leaf, here, config).sum()
        (gradient,) = torch.autograd.grad(total, leaf)
        return gradient

    return weigh


def _pad(rows: list[Array]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens int64 [B, T] and which of them are real, bool [B, T]."""
    longest = max(len(row) for row in rows)
    tokens = np.zeros((len(rows), longest), np.int64)
    real = np.zeros((len(rows), longest), np.bool_)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
        real[index, : len(row)] = True
    return torch.from_numpy(tokens), torch.from_numpy(real)


def _columns(rows: list[Array]) -> torch.Tensor:
    """Rows [N] or [N, K] one under the other, as [P, K]."""
    return torch.from_numpy(np.concatenate([row.reshape(len(row), -1) for row in rows]))
