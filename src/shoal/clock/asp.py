"""Asynchronous: nobody waits for anybody.

When to use: workers of very different speed, or that come and go, where gradients of old parameters do no harm.
Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.clock.base import Clock


class Asp(Clock):
    """Every part is an update as soon as it is there."""

    summary: ClassVar[str] = "nobody waits for anybody"

    @property
    def bound(self) -> None:
        return None
