"""What a merge did to each tensor, and how much of the update survived rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Below this, rounding has eaten enough of the update to say so.
LOW_SURVIVAL = 0.9


@dataclass(frozen=True, kw_only=True)
class BlockStats:
    """Sums over a block of rows: squares of the base and of the update, the product of the
    update with the change that was really stored, elements, and elements that changed."""

    base_square: float = 0.0
    delta_square: float = 0.0
    realised: float = 0.0
    elements: int = 0
    changed: int = 0

    @classmethod
    def of(
        cls, before: torch.Tensor, delta: torch.Tensor | None, after: torch.Tensor
    ) -> BlockStats:
        """Measure a block: float32 before, float32 update (None: only converted), as stored."""
        import torch

        if delta is None:
            return cls(elements=before.numel())
        # Against the base as it would be stored, or a mere conversion would pass for a change.
        changed = int(torch.count_nonzero(after != before.to(after.dtype)))
        change = after.float() - before
        return cls(
            base_square=_dot(before, before),
            delta_square=_dot(delta, delta),
            realised=_dot(change, delta),
            elements=before.numel(),
            changed=changed,
        )


def _dot(left: torch.Tensor, right: torch.Tensor) -> float:
    # A row at a time in float32, the rows in float64: exact enough for millions of elements.
    return float((left * right).sum(dim=1).double().sum())


def summed(blocks: Iterable[BlockStats]) -> BlockStats:
    """The sum over blocks, in order."""
    every = list(blocks)
    return BlockStats(
        base_square=math.fsum(block.base_square for block in every),
        delta_square=math.fsum(block.delta_square for block in every),
        realised=math.fsum(block.realised for block in every),
        elements=sum(block.elements for block in every),
        changed=sum(block.changed for block in every),
    )


@dataclass(frozen=True, kw_only=True)
class TensorReport:
    """One merged tensor.

    Fields:
        relative_delta: size of the update over that of the base (Frobenius norms).
        survival: share of the update, along its own direction, that is in the stored result.
        changed: share of the elements stored otherwise than the base alone would be.
    """

    name: str
    dtype: str
    relative_delta: float
    survival: float
    changed: float

    @classmethod
    def of(cls, name: str, dtype: str, stats: BlockStats) -> TensorReport:
        """From a tensor's sums."""
        base = math.sqrt(stats.base_square)
        delta = math.sqrt(stats.delta_square)
        return cls(
            name=name,
            dtype=dtype,
            # A base of zeros is all update.
            relative_delta=_rounded(delta / base) if base else 1.0,
            survival=_rounded(stats.realised / stats.delta_square) if delta else 0.0,
            changed=_rounded(stats.changed / stats.elements),
        )


def _rounded(value: float) -> float:
    """Six digits: all that is meaningful, and the same on every machine."""
    return float(f"{value:.6g}")


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """A whole merge; the same for equal inputs, so it holds no times."""

    dtype: str
    tensors: Sequence[TensorReport]
    config_changes: Sequence[dict[str, Any]] = ()
    verification: dict[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def summary(self) -> dict[str, Any]:
        """What is kept with the version."""
        return {
            "dtype": self.dtype,
            "tensors": len(self.tensors),
            "relative_delta": _spread([t.relative_delta for t in self.tensors]),
            "survival": _spread([t.survival for t in self.tensors]),
            "changed": _spread([t.changed for t in self.tensors]),
            "config_changes": list(self.config_changes),
            "verification": self.verification,
            "warnings": list(self.warnings),
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "mean": _rounded(sum(values) / len(values)), "max": max(values)}


def survival_warnings(tensors: Sequence[TensorReport]) -> list[str]:
    """A line where too much of the update is lost to rounding."""
    low = [t for t in tensors if t.survival < LOW_SURVIVAL]
    if not low:
        return []
    worst = min(low, key=lambda tensor: tensor.survival)
    return [
        f"rounding to {worst.dtype} loses more than {1 - LOW_SURVIVAL:.0%} of the update of "
        f"{len(low)} of {len(tensors)} tensors ({worst.survival:.0%} of {worst.name} survives): "
        "merge with dtype float32, or serve the adapter unmerged"
    ]
