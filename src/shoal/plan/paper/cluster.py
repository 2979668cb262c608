"""A cluster nobody here has, as a TOML file describes it.

card = "A100-80GB"          # shapes that are known: cards.py; or give memory, peak, inside, between yourself
hosts = 48
cards_per_host = 8
memory = "80GB"
peak = { bf16 = 312e12 }    # FLOP/s
inside = "300GB/s"          # a card to its neighbours of one host, in one direction
between = "200Gb/s"         # a card to other hosts

[achieved]                  # what of that is reached, if it is known; else what was fitted to published runs
matrix = 0.55
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.errors import ConfigError
from shoal.plan.paper.achieved import FITTED, TYPICAL, Achieved
from shoal.plan.paper.cards import CARDS, Card
from shoal.table import did_you_mean

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_AMOUNT = re.compile(r"([\d.]+(?:e[+-]?\d+)?)\s*([KMGTP]?)(i?)(B|b|bit|bytes)?(?:/s)?$")


@dataclass(frozen=True)
class Cluster:
    """Cards in hosts."""

    card: Card
    hosts: int = 1
    name: str = ""
    achieved: Achieved = field(default_factory=lambda: TYPICAL)

    @property
    def cards(self) -> int:
        """Of all hosts."""
        return self.hosts * self.card.per_host


def parse_amount(text: object, what: str) -> float:
    """Bytes, or bytes a second, from a number or a text with a unit.

    >>> parse_amount("200Gb/s", "between"), parse_amount("80GB", "memory"), parse_amount("1KiB", "memory")
    (25000000000.0, 80000000000.0, 1024.0)
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and math.isfinite(text) and text > 0:
        return float(text)
    match = _AMOUNT.match(text.strip()) if isinstance(text, str) else None
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{what}: {text!r} is no amount; write it like 80GB, 10Gb/s or 300GB/s.")
    base = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}[match[2]]
    unit = 1024.0**base if match[3] else _UNITS[match[2]]
    return number * unit / (8 if match[4] in ("b", "bit") else 1)


def read_cluster(path: Path) -> Cluster:
    """Read a description; what it says wrongly gets a sentence."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--cluster {path}: {error.strerror}; give a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cluster {path} is not TOML ({error}); see docs/guides/plan.md.") from None
    return cluster_of(found, f"--cluster {path}")


_KEYS = (
    "card",
    "hosts",
    "cards_per_host",
    "memory",
    "memory_bandwidth",
    "peak",
    "inside",
    "between",
    "achieved",
)


def cluster_of(found: dict[str, object], who: str) -> Cluster:
    """A cluster from what a TOML file says.

    >>> cluster_of({"card": "H100", "hosts": 2}, "here").cards
    16
    """
    for name in found:
        if name not in _KEYS:
            raise ConfigError(f"{who}: there is no '{name}'{did_you_mean(name, _KEYS)}")
    kind = found.get("card")
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(f"{who}: card is {kind!r}; give a name such as 'A100-80GB'.")
    if kind is None:
        missing = [name for name in ("memory", "peak", "inside", "between") if name not in found]
        if missing:
            raise ConfigError(f"{who} says neither card nor {missing[0]}; known cards: {', '.join(CARDS)}.")
        card = Card({}, 0.0, 0.0, 0.0, 0.0, 1, "given")
    else:
        card = CARDS.look_up(kind)
    given = {
        name: parse_amount(found[name], f"{who}: {name}")
        for name in ("memory", "memory_bandwidth", "inside", "between")
        if name in found
    }
    card = replace(card, **given)  # type: ignore[arg-type]
    if "peak" in found:
        card = replace(card, peak=_peaks(found["peak"], who))
    card = replace(
        card, per_host=_whole(found.get("cards_per_host", card.per_host), f"{who}: cards_per_host")
    )
    if card.memory_bandwidth == 0:
        raise ConfigError(f"{who} says no memory_bandwidth; give one such as 2TB/s, or a known card.")
    hosts = _whole(found.get("hosts", 1), f"{who}: hosts")
    fitted = FITTED.get(kind or "", TYPICAL)
    return Cluster(card, hosts, kind or "cards", _achieved(found.get("achieved", {}), fitted, who))


def _peaks(found: object, who: str) -> dict[str, float]:
    table = found if isinstance(found, dict) else {"bf16": found}
    peaks = {str(name): parse_amount(value, f"{who}: peak") for name, value in table.items()}
    if "bf16" not in peaks:
        raise ConfigError(f"{who}: peak has no bf16; give it, as in peak = {{ bf16 = 312e12 }}.")
    return peaks


def _whole(value: object, what: str) -> int:
    if type(value) is not int or not 0 < value <= 10**7:
        raise ConfigError(f"{what} is {value!r}; give a whole number above 0.")
    return value


def _achieved(found: object, fitted: Achieved, who: str) -> Achieved:
    known = {f.name for f in dataclasses.fields(Achieved) if f.name not in ("source", "error")}
    if not isinstance(found, dict):
        raise ConfigError(f"{who}: achieved is a table, as in [achieved] matrix = 0.55.")
    for name, value in found.items():
        if name not in known:
            raise ConfigError(f"{who}: achieved has no '{name}'{did_you_mean(name, known)}")
        if type(value) not in (int, float) or not 0 < value < 1e6:
            raise ConfigError(f"{who}: achieved.{name} is {value!r}; give a number above 0.")
    return replace(fitted, **found, source="given", error=0.0) if found else fitted
