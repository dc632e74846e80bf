"""What a request asks about its prompt, computed from the logits of the prompt's positions.

The token at position i is predicted by the logits at i - 1, so position 0 has no score.
Logits are taken a chunk at a time and never all held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from session_core.choose import draw_alternatives
from session_core.operations import Array
from session_core.projection import CHUNK_LOGITS
from session_core.requests import SampleRequest

NOTHING = -99999.0
"""The logprob that stands for none, beside token id 0, in a list of the likeliest."""


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """Of a prompt of P tokens; None for what was not asked.

    Fields:
        logprobs: float32 [P], NaN where not computed.
        top_ids, top_logprobs: int32 and float32 [P, k], the likeliest first; a row that was
            not computed holds id 0 and `NOTHING`.
        target_logprobs: float32 [P - 1, K], 0 where the target is -1.
        alternative_ids, alternative_logprobs: int64 and float32 [P - 1, k], drawn.
    """

    logprobs: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    target_logprobs: Array | None = None
    alternative_ids: Array | None = None
    alternative_logprobs: Array | None = None

    def arrays(self) -> dict[str, Array]:
        """As arrays of a sample's result."""
        named = {
            "prompt_logprobs": self.logprobs,
            "prompt_top.ids": self.top_ids,
            "prompt_top.logprobs": self.top_logprobs,
            "prompt_targets.logprobs": self.target_logprobs,
            "prompt_alternatives.ids": self.alternative_ids,
            "prompt_alternatives.logprobs": self.alternative_logprobs,
        }
        return {name: array for name, array in named.items() if array is not None}


@torch.no_grad()
def score_prompt(
    request: SampleRequest,
    logits_at: Callable[[int, int], torch.Tensor],
    *,
    vocabulary: int,
    device: torch.device,
) -> PromptScores:
    """Answer what a request asks about its prompt.

    Args:
        logits_at: (start, end) -> float logits [end - start, V] of those prompt positions.
    """
    count = len(request.tokens)
    top, width = request.top_prompt, request.alternatives
    targets = request.prompt_targets
    logprobs = np.full(count, np.nan, np.float32)
    top_ids = np.zeros((count, top), np.int32)
    top_logprobs = np.full((count, top), NOTHING, np.float32)
    target_logprobs = None if targets is None else np.zeros(targets.shape, np.float32)
    drawn_ids = np.zeros((count - 1, width), np.int64)
    drawn_logprobs = np.zeros((count - 1, width), np.float32)
    stream = request.stream_of_alternatives()
    first_scored = max(1, count - request.last_scored) if request.last_scored else 1
    everywhere = targets is not None or width > 0
    chunk = max(1, CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cuda"]) // vocabulary)
    for start in range((1 if everywhere else first_scored) - 1, count - 1, chunk):
        end = min(start + chunk, count - 1)
        scores = torch.log_softmax(logits_at(start, end).float(), dim=-1)
        own = torch.from_numpy(request.tokens[start + 1 : end + 1]).to(device)
        logprobs[start + 1 : end + 1] = scores.gather(1, own[:, None])[:, 0].cpu().numpy()
        if top:
            best = scores.topk(top, dim=-1)
            top_ids[start + 1 : end + 1] = best.indices.cpu().numpy()
            top_logprobs[start + 1 : end + 1] = best.values.cpu().numpy()
        if targets is not None and target_logprobs is not None:
            asked = torch.from_numpy(targets[start:end]).to(device)
            found = scores.gather(1, asked.clamp(min=0))
            target_logprobs[start:end] = torch.where(asked < 0, 0.0, found).cpu().numpy()
        if width:
            ids = draw_alternatives(
                scores, stream.random((end - start, width)), temperature=request.temperature
            )
            drawn_ids[start:end] = ids.cpu().numpy()
            drawn_logprobs[start:end] = scores.gather(1, ids).cpu().numpy()
    logprobs[:first_scored] = np.nan
    top_ids[:first_scored], top_logprobs[:first_scored] = 0, NOTHING
    return PromptScores(
        logprobs=logprobs if request.prompt_logprobs else None,
        top_ids=top_ids if top else None,
        top_logprobs=top_logprobs if top else None,
        target_logprobs=target_logprobs,
        alternative_ids=drawn_ids if width else None,
        alternative_logprobs=drawn_logprobs if width else None,
    )
