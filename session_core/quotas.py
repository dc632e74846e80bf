"""How much a tenant may have at once, and in a day. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from registry.errors import InvalidInput, QuotaExceeded, TooMany
from session_core import operations as op
from session_core.operations import Operation

HIGHEST = 2**53
"""The largest limit: the largest number that every JSON reader reads exactly."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A tenant's limits; None is no limit.

    Fields:
        sessions: active at once. A session counts until it is stopped or expires.
        operations: training operations that wait at once.
        samples: sequences being sampled, or waiting to be, at once.
        tokens_per_day: trained on, read and sampled in a UTC day.
        context: tokens of a datum, and of a prompt with what is sampled after it.
    """

    sessions: int | None = None
    operations: int | None = 10_000
    samples: int | None = 20_000
    tokens_per_day: int | None = None
    context: int | None = None

    def with_limits(self, limits: Mapping[str, int | None]) -> Self:
        """The quota with some limits replaced."""
        return replace(self, **{name: limits[name] for name in NAMES if name in limits})

    def check_sessions(self, active: int) -> None:
        """Refuse a session beside those that are active. Raises: QuotaExceeded."""
        if self.sessions is not None and active >= self.sessions:
            raise QuotaExceeded(
                f"{active} sessions are active, of {self.sessions} this tenant may have: stop one "
                "(`slipway sessions list --active`, `slipway sessions stop SESSION`), or wait "
                "until one expires"
            )

    def check_operations(self, queued: int) -> None:
        """Refuse an operation beside those that wait. Raises: TooMany."""
        if self.operations is not None and queued >= self.operations:
            raise TooMany(
                f"{queued} operations of this tenant wait, and it may have {self.operations} "
                "waiting: submit it again once some are done"
            )

    def check_samples(self, running: int, wanted: int) -> None:
        """Refuse samples beside those under way.

        Raises:
            QuotaExceeded: if so many may never be asked for at once.
            TooMany: if they may when others are done.
        """
        if self.samples is None or running + wanted <= self.samples:
            return
        if wanted > self.samples:
            raise QuotaExceeded(
                f"num_samples is {wanted}, and this tenant may have {self.samples} samples at once"
            )
        raise TooMany(
            f"{running} samples of this tenant are under way, and it may have {self.samples} at "
            "once: ask again once some are done"
        )

    def check_tokens(self, used: int, wanted: int) -> None:
        """Refuse tokens beyond those of a day.

        Args:
            used: today, with what has been let in and is not done.

        Raises: QuotaExceeded.
        """
        if self.tokens_per_day is not None and used + wanted > self.tokens_per_day:
            raise QuotaExceeded(
                f"{wanted} tokens would be more than is left of today's {self.tokens_per_day}: "
                f"{used} are used or promised; the next day begins at 00:00 UTC"
            )

    def check_datums(self, operation: Operation) -> None:
        """Refuse a datum that is longer than the context. Raises: QuotaExceeded."""
        offsets = operation.arrays.get("tokens.offsets")
        if self.context is None or operation.kind not in TRAINING or offsets is None:
            return
        lengths = offsets[1:] - offsets[:-1]
        if len(lengths) and int(lengths.max()) > self.context:
            raise QuotaExceeded(
                f"datum {int(lengths.argmax())} has {int(lengths.max())} tokens, and this tenant "
                f"may have {self.context} in a context"
            )

    def bounded(self, operation: Operation) -> Operation:
        """A sample operation that ends where the context does.

        Raises: QuotaExceeded: if its prompt leaves no room.
        """
        if self.context is None:
            return operation
        room = self.context - prompt_tokens(operation)
        if room < 1:
            raise QuotaExceeded(
                f"the prompt has {prompt_tokens(operation)} tokens; with one token sampled, the "
                f"{self.context} this tenant may have in a context hold {self.context - 1}"
            )
        asked = operation.params.get("max_tokens")
        if not isinstance(asked, int) or asked > room:
            params = {**operation.params, "max_tokens": room}
            return replace(operation, params=params)
        return operation


TRAINING = frozenset({op.FORWARD, op.FORWARD_BACKWARD})
NAMES = tuple(field.name for field in fields(Quota))


def check_limit(name: str, value: int | None) -> int | None:
    """A limit, checked. Raises: InvalidInput."""
    if name not in NAMES:
        raise InvalidInput(f"there is no limit {name!r}: expected one of {', '.join(NAMES)}")
    if value is not None and not 0 <= value <= HIGHEST:
        raise InvalidInput(f"{name} is {value}: a limit is 0 to {HIGHEST}, or none")
    return value


def prompt_tokens(operation: Operation) -> int:
    """How many tokens a sample operation's prompt has."""
    return len(operation.arrays.get("tokens", ()))


def samples_of(operation: Operation) -> int:
    """How many sequences a sample operation asks for; its engine checks the number."""
    asked = operation.params.get("num_samples")
    return asked if isinstance(asked, int) and asked > 0 else 1


def training_tokens(operation: Operation) -> int:
    """How many tokens a training operation is billed for, if it succeeds."""
    return len(operation.arrays.get("tokens", ())) if operation.kind in TRAINING else 0


def sampling_tokens(operation: Operation, context: int) -> int:
    """How many tokens a sample operation is billed for, at most.

    Args:
        context: of the model, for a request that does not bound its samples.
    """
    prompt = prompt_tokens(operation)
    asked = operation.params.get("max_tokens")
    room = max(0, context - prompt)
    longest = min(asked, room) if isinstance(asked, int) and asked >= 0 else room
    return prompt + samples_of(operation) * longest
