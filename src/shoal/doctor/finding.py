"""What the doctor is asked, what it measures, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Facts = dict[str, Json]
"""What one host says of itself, for one check: plain values, for they travel."""


class Level(IntEnum):
    """How bad a finding is."""

    OK = 0
    WARNING = 1
    """Training works, slower or shorter than it could."""
    FAULT = 2
    """Training will fail, or never begin."""


@dataclass(frozen=True)
class Request:
    """What is to be examined. Each host has its own."""

    workers: int = 2
    """On this host."""
    folder: Path = Path("runs")
    """Where checkpoints will be."""
    hosts: int = 1
    host: int = 0
    at: str = ""
    """ADDRESS:PORT of host 0; empty if there is one host only."""
    wait: float = 120.0
    """Seconds that hosts wait for each other to begin."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found on one host: what, the number, the remedy."""

    check: str
    host: int
    level: Level
    what: str
    number: float | None = None
    unit: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Link:
    """What a message and a stream take from one host to another."""

    source: int
    target: int
    seconds: float
    """Half a round trip of one byte, the median."""
    bytes_per_second: float
    error: str = ""


@dataclass(frozen=True)
class Skew:
    """How far ahead of host 0 the clock of a host is."""

    seconds: float
    within: float
    """Half of the fastest round trip: the error cannot be larger."""


@dataclass(frozen=True)
class Examination:
    """All that was measured, for the check that judges it."""

    request: Request
    facts: Mapping[int, Facts]
    """Of this check, by host."""
    links: Sequence[Link] = ()
    skews: Mapping[int, Skew] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    """Hosts that did not take part, and why."""


@dataclass(frozen=True)
class Check:
    """One kind of thing that can be wrong: every host measures it, and host 0 judges all of them."""

    summary: str
    measure: Callable[[Request], Facts]
    judge: Callable[[Examination], list[Finding]]


@dataclass
class Says:
    """Collects the findings of one check.

    >>> says = Says("clock")
    >>> says.ok(0, "synchronised")
    >>> says.found[0].level.name
    'OK'
    """

    check: str
    found: list[Finding] = field(default_factory=list)

    def ok(self, host: int, what: str, number: float | None = None, unit: str = "") -> None:
        self.found.append(Finding(self.check, host, Level.OK, what, number, unit))

    def warn(self, host: int, what: str, number: float | None, unit: str, remedy: str) -> None:
        self.found.append(Finding(self.check, host, Level.WARNING, what, number, unit, remedy))

    def fault(self, host: int, what: str, number: float | None, unit: str, remedy: str) -> None:
        self.found.append(Finding(self.check, host, Level.FAULT, what, number, unit, remedy))

    def nothing_bad(self, host: int) -> bool:
        """Whether a host has no finding of this check so far."""
        return not any(each.host == host for each in self.found)


def number(facts: Facts, name: str) -> float:
    """A number that a host has sent; TypeError if it is none: others may answer at an address, too.

    >>> number({"free": 3}, "free")
    3.0
    """
    value = facts[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r:.40}")
    return float(value)


def text(facts: Facts, name: str) -> str:
    """The same for text."""
    value = facts[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r:.40}")
    return value


def texts(facts: Facts, name: str) -> list[str]:
    """The same for a list of texts."""
    value = facts[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r:.40}")
    found = [each for each in value if isinstance(each, str)]
    if len(found) < len(value):
        raise TypeError(f"{name} is {value!r:.40}")
    return found
