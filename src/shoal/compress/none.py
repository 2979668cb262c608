"""Send gradients as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.types import Promise


@dataclass(frozen=True)
class Uncompressed:
    """Gradients travel in their own dtype."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str] = "gradients travel as they are"
