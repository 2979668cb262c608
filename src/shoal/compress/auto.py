"""Compress only if it is faster here: the first steps are measured both ways.

Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022: in most data
centres it does not pay.
When to use: whenever you do not know the network. `auto` weighs int8, `auto(topk(0.01))` weighs what you name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from shoal.compress.base import Code, Compressor, Layout
from shoal.config import parse_choice
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Auto(Compressor):
    """Another compressor, if steps are faster with it.

    >>> print(Auto(), Auto("topk(0.01)"))
    int8 topk(0.01)
    """

    summary: ClassVar[str] = "another compressor, if the first steps are faster with it"
    bound: ClassVar[float] = 0.15
    tried: ClassVar[bool] = True
    candidate: str = "int8"

    def __post_init__(self) -> None:
        if self._made.tried:
            raise ConfigError(
                f"auto({self.candidate}) has nothing to weigh; name a compressor, as in auto(int8)."
            )

    @property
    def feedback(self) -> bool:
        return self._made.feedback

    def code(self, layout: Layout) -> Code:
        return self._made.code(layout)

    def __str__(self) -> str:
        return self.candidate

    @cached_property
    def _made(self) -> Compressor:
        from shoal.compress import make_compressor  # whose table lists this file

        return make_compressor(parse_choice(self.candidate, "compressor"))
