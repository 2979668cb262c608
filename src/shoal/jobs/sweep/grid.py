"""What a sweep tries: every combination of the values of its keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from shoal.errors import ConfigError

MOST_TRIALS = 10_000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)$")
_KEY = re.compile(r"[A-Za-z_][\w-]*$", re.ASCII)


@dataclass(frozen=True)
class Axis:
    """A key, and the values that it takes.

    >>> parse_axis("seed=0..2"), parse_axis("lr=1e-4,3e-4").values
    (Axis(key='seed', values=('0', '1', '2')), ('1e-4', '3e-4'))
    """

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """One combination."""

    settings: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The name of its folder.

        >>> Trial((("lr", "1e-4"), ("strategy", "ddp * tp2"))).name
        'lr=1e-4,strategy=ddp-tp2'
        """
        words = (f"{key}={re.sub(r'[^A-Za-z0-9_.+-]+', '-', value)}" for key, value in self.settings)
        return ",".join(words)


def parse_axis(text: str) -> Axis:
    """What one `--set` says: a list, a range of whole numbers that has both ends, or one value."""
    key, equals, rest = text.partition("=")
    if not equals or not _KEY.match(key) or not rest:
        raise ConfigError(f"--set {text}: write a key and its values, as lr=1e-4,3e-4 or seed=0..4.")
    values: list[str] = []
    for part in _split(rest):
        found = _RANGE.match(part)
        if found is None:
            values.append(part)
            continue
        first, last = int(found[1]), int(found[2])
        if not 0 <= last - first < MOST_TRIALS:
            raise ConfigError(f"--set {text}: {part} is no range; the smaller end comes first, as in 0..4.")
        values += map(str, range(first, last + 1))
    if len(set(values)) < len(values) or not all(values):
        raise ConfigError(f"--set {text} names a value twice, or none; give each once.")
    return Axis(key, tuple(values))


def _split(text: str) -> list[str]:
    """At commas that no bracket holds: "cosine(warmup=10, low=0),constant" are two."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def trials_of(axes: Sequence[Axis]) -> list[Trial]:
    """All combinations, the last key changing first.

    >>> [trial.name for trial in trials_of([Axis("a", ("1", "2")), Axis("b", ("x",))])]
    ['a=1,b=x', 'a=2,b=x']
    """
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"--set names {twice} twice; give all its values at once.")
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_TRIALS:
        raise ConfigError(f"{count} trials are too many; {MOST_TRIALS} is the most.")
    trials = [
        Trial(tuple(zip(keys, values, strict=True))) for values in product(*(axis.values for axis in axes))
    ]
    names = [trial.name for trial in trials]
    if len(set(names)) < len(names):
        raise ConfigError("two trials would have one folder: their values differ in signs only; change one.")
    return trials
