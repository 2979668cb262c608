"""A table of names: how a slot lists its choices, and how a wrong name gets a helpful answer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from shoal.errors import ConfigError

T = TypeVar("T")


class Table(Mapping[str, T], Generic[T]):
    """An immutable mapping from name to choice that knows what kind of thing it lists.

    >>> colours = Table("colour", {"red": 1, "green": 2})
    >>> colours.look_up("red")
    1
    >>> colours.look_up("gren")
    Traceback (most recent call last):
    shoal.errors.ConfigError: unknown colour 'gren'; did you mean 'green'? There are: green, red.
    """

    def __init__(self, kind: str, choices: Mapping[str, T]) -> None:
        self.kind = kind
        self._choices = dict(choices)

    def __getitem__(self, name: str) -> T:
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def look_up(self, name: str) -> T:
        """The choice called `name`, or a ConfigError that names the nearest one."""
        if name in self._choices:
            return self._choices[name]
        raise ConfigError(f"unknown {self.kind} '{name}'{did_you_mean(name, self._choices)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" sentence: the nearest known name, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return f"{hint} There are: {', '.join(names)}." if names else hint
