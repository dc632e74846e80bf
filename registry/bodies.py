"""What every request body has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A request body: fields it does not know are refused, so that a typo is noticed."""

    model_config = ConfigDict(extra="forbid")
