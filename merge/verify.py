"""Checks a merged model against what it was made of, from its files on disk.

`verify_headers` and `verify_samples` need no model in memory; `verify_logits` runs the base
with the adapter beside the merged model, one after the other.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from merge.blocks import DTYPES, RawFile, read_matrix, read_rows
from merge.folder import CONFIG, read_json, read_weights
from merge.headers import TensorEntry
from merge.load import attach_adapter, load_base
from merge.plan import Plan, TensorPlan
from registry.errors import Corrupt

SAMPLED_ROWS = 4
PROBE = "probe.json"
_PROMPTS, _PROMPT_TOKENS = 4, 32


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What two models that should be the same may differ by.

    Fields:
        difference: largest difference of a logit, in standard deviations of the logits.
        divergence: largest mean KL divergence of the next token, in nats.
        agreement: least share of positions with the same most likely token. Positions where
            the adapter itself holds the two tokens closer than ``difference`` do not count.
    """

    difference: float
    divergence: float
    agreement: float


# By the type the merged weights are stored in: rounding to it is all that may differ. For
# float32 that is the noise of a forward pass: a 135M model's own logits in float32 were seen
# 0.0024 standard deviations away from those in float64, its adapter not even merged.
THRESHOLDS = {
    "float32": Thresholds(difference=2e-2, divergence=1e-5, agreement=1.0),
    "float16": Thresholds(difference=0.05, divergence=1e-3, agreement=0.99),
    "bfloat16": Thresholds(difference=0.3, divergence=2e-2, agreement=0.95),
}


@dataclass(frozen=True, kw_only=True)
class LogitsReport:
    """The merged model's next-token logits against those of base and adapter.

    Fields:
        positions: compared positions.
        max_difference: largest difference of a logit.
        relative_difference: the same in standard deviations of the adapter's logits.
        divergence: mean KL divergence from the adapter's distribution, in nats.
        agreement: share of positions with the same most likely token.
        base_divergence: mean KL divergence of the bare base, to compare with.
    """

    positions: int
    max_difference: float
    relative_difference: float
    divergence: float
    agreement: float
    base_divergence: float

    def describe(self) -> dict[str, Any]:
        """As JSON, to four digits."""
        return {key: float(f"{value:.4g}") for key, value in asdict(self).items()}


def verify_headers(plan: Plan, output: Path) -> int:
    """Names and shapes must be the base's, plus an untied head; types those planned.

    Returns the number of tensors. Raises Corrupt where they differ.
    """
    merged, base = read_weights(output), plan.weights
    expected = {name: base.entry(name).shape for name in base.places}
    expected |= {t.name: t.source.shape for t in plan.merged if t.untied}
    found = {name: merged.entry(name).shape for name in merged.places}
    if found != expected:
        differing = sorted(found.items() ^ expected.items())
        raise Corrupt(f"the merged weights differ from the base's in {differing[0][0]}")
    for shard in plan.shards:
        for tensor in shard.tensors:
            entry = merged.entry(tensor.name)
            if merged.places[tensor.name] != shard.name or entry.dtype != tensor.dtype:
                raise Corrupt(f"the merged tensor {tensor.name} is not where or what was planned")
    config = read_json(output / CONFIG)
    wanted = {change.key: change.after for change in plan.config_changes}
    if {key: config.get(key) for key in wanted} != wanted:
        raise Corrupt(f"the merged model's {CONFIG} is not what was planned")
    return len(found)


def verify_samples(plan: Plan, output: Path, *, rows: int = SAMPLED_ROWS) -> int:
    """Recompute rows of every merged tensor in float64 and compare with what is stored.

    Returns the number of elements compared. Raises Corrupt where one is off by more than the
    rounding to its type and the float32 sum explain.
    """
    compared = 0
    merged = read_weights(output)
    with RawFile(plan.adapter.weights) as adapter:
        for tensor in plan.merged:
            entry = merged.entry(tensor.name)
            with (
                RawFile(plan.base / tensor.base_file) as base,
                RawFile(output / merged.places[tensor.name]) as result,
            ):
                compared += _verify_tensor(tensor, entry, base, result, adapter, rows)
    return compared


def _verify_tensor(
    tensor: TensorPlan,
    entry: TensorEntry,
    base: RawFile,
    result: RawFile,
    adapter: RawFile,
    rows: int,
) -> int:
    lora = tensor.lora
    assert lora is not None
    a = read_matrix(adapter, lora.a).double()
    b = read_matrix(adapter, lora.b).double()
    left, right = (a.T, b.T) if tensor.transposed else (b, a)
    height = tensor.source.shape[0]
    # The same rows each time for one name, other rows for another.
    seed = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:8], "big")
    chosen = sorted(random.Random(seed).sample(range(height), min(rows, height)))
    compared = 0
    for row in chosen:
        before = read_rows(base, tensor.source, row, row + 1).double()
        exact = before + lora.scale * (left[row : row + 1] @ right)
        stored = read_rows(result, entry, row, row + 1).double()
        # Each float32 step may be off by an ulp of what it sums; the last rounding by half of
        # its own type's, or by the type's smallest step near zero.
        summands = before.abs() + abs(lora.scale) * (left[row].abs()[None] @ right.abs())
        single, kind = torch.finfo(torch.float32), torch.finfo(DTYPES[entry.dtype])
        allowed = (lora.rank + 4) * single.eps * summands + kind.eps * exact.abs()
        allowed += kind.smallest_normal * kind.eps
        if not bool(((stored - exact).abs() <= allowed).all()):
            raise Corrupt(
                f"row {row} of the merged tensor {tensor.name} is not what base and adapter "
                "make when it is recomputed in float64"
            )
        compared += exact.numel()
    return compared


def verify_logits(plan: Plan, output: Path) -> LogitsReport:
    """Run base, base with adapter, and merged model on a few prompts, all in float32 on CPU.

    Raises:
        Corrupt: if the merged model differs from the adapter by more than the thresholds of
            its type, or does not differ from the base.
    """
    model = load_base(plan.base, dtype=torch.float32)
    tokens = torch.tensor(prompts(plan.adapter.folder, model.get_input_embeddings().num_embeddings))
    base = _logits(model, tokens)
    adapted = _logits(attach_adapter(model, plan.adapter.folder), tokens)
    del model
    merged = _logits(load_base(output, dtype=torch.float32), tokens)
    report = compare(base, adapted, merged, THRESHOLDS[plan.dtype])
    check(report, plan.dtype, differs=not torch.equal(base, merged))
    return report


def compare(
    base: torch.Tensor, adapted: torch.Tensor, merged: torch.Tensor, thresholds: Thresholds
) -> LogitsReport:
    """Measure logits [positions, vocabulary] against each other."""
    difference = (adapted - merged).abs().max().item()
    spread = adapted.std().item()
    wanted, got = adapted.argmax(-1, keepdim=True), merged.argmax(-1, keepdim=True)
    margin = (adapted.gather(-1, wanted) - adapted.gather(-1, got)).abs()
    agree = (wanted == got) | (margin <= thresholds.difference * spread)
    return LogitsReport(
        positions=len(adapted),
        max_difference=difference,
        relative_difference=difference / spread,
        divergence=_divergence(adapted, merged),
        agreement=agree.double().mean().item(),
        base_divergence=_divergence(adapted, base),
    )


def check(report: LogitsReport, dtype: str, *, differs: bool) -> None:
    """Hold a comparison against the thresholds of a type. Raises Corrupt."""
    limits = THRESHOLDS[dtype]
    if not differs:
        raise Corrupt("the merged model answers exactly as the base does: the adapter is not in it")
    failed = [
        f"{what} is {value:.4g}, allowed is {limit:g}"
        for what, value, limit, bad in (
            (
                "the largest difference of a logit, in standard deviations,",
                report.relative_difference,
                limits.difference,
                report.relative_difference > limits.difference,
            ),
            (
                "the KL divergence",
                report.divergence,
                limits.divergence,
                report.divergence > limits.divergence,
            ),
            (
                "the share of equal tokens",
                report.agreement,
                limits.agreement,
                report.agreement < limits.agreement,
            ),
        )
        if bad
    ]
    if failed:
        raise Corrupt(f"the merged model does not answer as the adapter does: {'; '.join(failed)}")


def _divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean().clamp(min=0))


def prompts(adapter: Path, vocabulary: int) -> Sequence[Sequence[int]]:
    """Token ids to compare on: the package's own probe prompts, or drawn from the vocabulary."""
    if (adapter / PROBE).is_file():
        own = json.loads((adapter / PROBE).read_bytes()).get("prompts")
        if own:
            return [[int(token) for token in prompt] for prompt in own]
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(_PROMPT_TOKENS)] for _ in range(_PROMPTS)]


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [positions, vocabulary] of prompts [prompts, tokens], one prompt at a time."""
    rows = [model(input_ids=prompt[None], use_cache=False).logits[0].float() for prompt in tokens]
    return torch.cat(rows)
