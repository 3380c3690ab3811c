"""What every body is: strict, and without a field that is not named."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

Text = str  # bounded by the body, and by the model's context


class Body(BaseModel):
    """`max_values` bounds arrays and objects together, before anything of a body is parsed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    max_values: ClassVar[int] = 2**17
