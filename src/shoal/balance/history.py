"""Begins with the speeds of earlier runs of this model on these machines, then goes on as `dynamic`.

When to use: runs that come again. The first steps are balanced already. It is also the way to divide a pipeline by
speeds that nobody has to write down: train once with `ddp` and `history`, then with `ppN` and `history`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.balance.dynamic import Dynamic


@dataclass(frozen=True)
class History(Dynamic):
    """From earlier runs, then by measured speeds."""

    summary: ClassVar[str] = "begins with the speeds of earlier runs, then as dynamic"
    remembers: ClassVar[bool] = True
    divides_stages: ClassVar[bool] = True
