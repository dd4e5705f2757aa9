"""The base of every noun: frozen, compared by value, strict about keys and types, JSON both ways."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen value: unknown keys and silent conversions (text to number) are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
