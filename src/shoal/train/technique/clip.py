"""Gradient clipping: by the norm of the whole gradient, or each number by itself."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config import fill_options, parse_choice
from shoal.errors import ConfigError
from shoal.table import Table


@dataclass(frozen=True)
class ByNorm:
    """Scale the gradient down to a global norm of at most `limit`."""

    limit: float


@dataclass(frozen=True)
class ByValue:
    """Clamp every element of the gradient to [-limit, limit]."""

    limit: float


Clip = ByNorm | ByValue
TABLE: Table[type[Clip]] = Table("clip", {"norm": ByNorm, "value": ByValue})


def make_clip(text: float | str | None) -> Clip | None:
    """A number clips by norm; text names the way.

    >>> make_clip(1.0), make_clip("value(0.5)")
    (ByNorm(limit=1.0), ByValue(limit=0.5))
    """
    if text is None:
        return None
    if isinstance(text, str):
        choice = parse_choice(text, "clip")
        clip: Clip = fill_options(choice, TABLE.look_up(choice.name))
    else:
        clip = ByNorm(float(text))
    if not clip.limit > 0:
        raise ConfigError(f"clip={text}: the limit must be above 0.")
    return clip
