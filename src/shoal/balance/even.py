"""All workers get the same. The default.

When to use: workers of one kind. Nothing is measured, and nothing changes from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.balance.base import Balance, Basis, Fixed, Sharer


@dataclass(frozen=True)
class Even(Balance):
    """Every worker gets the same."""

    summary: ClassVar[str] = "the same for everybody"

    @property
    def measures(self) -> bool:
        return False

    def start(self, basis: Basis) -> Sharer:
        return Fixed(replace(basis, known=()))
