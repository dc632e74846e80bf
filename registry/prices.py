"""What tokens cost, by kind of use and base model. In what currency is the reader's to know."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal

from sqlmodel import Session, col, select

from registry.database import Database
from registry.errors import InvalidInput
from registry.models import TokenPrice, UsageKind
from registry.views import PriceView

ANY_MODEL = ""
LONGEST_NAME = 512
HIGHEST = Decimal(10**9)
PLACES = 9


class Prices:
    """The price list. A price holds for what runs from then on; the ledger keeps its own."""

    def __init__(self, db: Database, clock: Callable[[], datetime]) -> None:
        self._db = db
        self._clock = clock

    def list(self) -> list[PriceView]:
        """Every price, by kind and base model."""
        statement = select(TokenPrice).order_by(TokenPrice.kind, TokenPrice.base_model)
        with self._db.read() as session:
            return [_view(row) for row in session.exec(statement)]

    def set(
        self, kind: UsageKind, per_million: Decimal | None, *, base_model: str | None = None
    ) -> PriceView:
        """Set what a million tokens cost; None takes the price away.

        Args:
            base_model: for this one alone; without, for every model that has no price of its
                own.

        Raises:
            InvalidInput: for a price below 0, above a billion, finer than nine places, or no
                number; or a name no model can have.
        """
        if per_million is not None and not (
            per_million.is_finite()
            and 0 <= per_million <= HIGHEST
            and per_million == round(per_million, PLACES)
        ):
            raise InvalidInput(
                f"{per_million} is no price of a million tokens: it must be 0 to {HIGHEST}, with "
                f"at most {PLACES} places"
            )
        name = base_model or ANY_MODEL
        if len(name) > LONGEST_NAME:
            raise InvalidInput(f"a model's name has at most {LONGEST_NAME} characters")
        with self._db.write() as session:
            row = session.get(TokenPrice, (kind.value, name))
            if row is None:
                row = TokenPrice(kind=kind.value, base_model=name, set_at=self._clock())
            row.per_million = None if per_million is None else f"{per_million:f}"
            row.set_at = self._clock()
            session.add(row)
            session.flush()
            return _view(row)


def price_of(session: Session, kind: str, base_model: str | None) -> str | None:
    """The price in force, within a transaction: the model's own, or else the one for all."""
    names = {base_model or ANY_MODEL, ANY_MODEL}
    rows = session.exec(
        select(TokenPrice).where(
            TokenPrice.kind == kind,
            col(TokenPrice.base_model).in_(names),
            col(TokenPrice.per_million).is_not(None),
        )
    )
    # Any name is longer than the empty one, which stands for every model.
    return next(
        (row.per_million for row in sorted(rows, key=lambda row: -len(row.base_model))), None
    )


def _view(row: TokenPrice) -> PriceView:
    return PriceView(
        kind=UsageKind(row.kind),
        base_model=row.base_model or None,
        per_million=None if row.per_million is None else Decimal(row.per_million),
        set_at=row.set_at,
    )
