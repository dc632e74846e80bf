"""What a run's user metadata may ask for beyond the wire. Pure.

The SDK has no field for it, but hands the metadata on untouched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from registry.errors import InvalidInput

LORAPLUS_KEY = "loraplus_lr_ratio"


def lr_ratio_of(metadata: Mapping[str, Any]) -> float | None:
    """The LoRA+ ratio a run's metadata asks for: learning rate of B over that of A.

    A number or a text that is one; None where the metadata is silent. Raises InvalidInput
    unless it is finite and above zero.
    """
    raw = metadata.get(LORAPLUS_KEY)
    return None if raw is None else check_lr_ratio(raw)


def check_lr_ratio(raw: object) -> float:
    """A LoRA+ ratio as a number. Raises InvalidInput naming it when it is none."""
    try:
        ratio = float(raw) if isinstance(raw, int | float | str) else math.nan
    except (ValueError, OverflowError):
        ratio = math.nan
    if isinstance(raw, bool) or not math.isfinite(ratio) or ratio <= 0:
        raise InvalidInput(
            f"{LORAPLUS_KEY} is the learning rate of the B matrices over that of A, a number "
            f"above zero, not {raw!r}."
        )
    return ratio
