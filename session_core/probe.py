"""Prompts by which any server can be shown to have an adapter loaded.

A server that silently answers with the base model looks healthy. So every saved version
carries a few token sequences with the logprobs both the bare base and the adapted model
give them: whoever serves the version must come out near the one and away from the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

FORMAT = 1
PROMPTS = 4
LENGTH = 32


def probe_prompts(vocabulary: int, excluded: frozenset[int] = frozenset()) -> list[list[int]]:
    """Token sequences that depend on the vocabulary alone; special tokens are left out."""
    allowed = np.array([token for token in range(vocabulary) if token not in excluded])
    generator = np.random.Generator(np.random.PCG64(PROMPTS * LENGTH))
    picks = generator.integers(0, len(allowed), size=(PROMPTS, LENGTH))
    prompts: list[list[int]] = allowed[picks].tolist()
    return prompts


def dump_probe(
    prompts: Sequence[Sequence[int]],
    *,
    base: Sequence[Sequence[float]],
    adapter: Sequence[Sequence[float]],
) -> bytes:
    """The bytes of probe.json.

    `base` and `adapter` hold the logprob of each token but the first, given those before;
    in the file a null stands for the first.
    """
    return json.dumps(
        {
            "format": FORMAT,
            "prompts": [list(prompt) for prompt in prompts],
            "base": [[None, *row] for row in base],
            "adapter": [[None, *row] for row in adapter],
        },
        separators=(",", ":"),
    ).encode()
