"""The kinds of numbers that a configuration holds, with their bounds, and lengths of training with their units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True)

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]

DURATION_UNITS = ("steps", "samples", "epochs", "fraction")


@dataclass(frozen=True)
class Duration:
    """A length of training. Exactly one of the four: `{ steps = 100 }`, `{ samples = 2_000_000 }`, ..."""

    __pydantic_config__ = STRICT
    steps: Count | None = None
    samples: Count | None = None
    epochs: Positive | None = None
    fraction: PositiveShare | None = None  # of the whole training

    def __post_init__(self) -> None:
        given = [unit for unit in DURATION_UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"found {found}, wanted exactly one of steps, samples, epochs, fraction")
