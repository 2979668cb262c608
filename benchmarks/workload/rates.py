"""The rate of a network, as people write it."""

from __future__ import annotations

import re

from shoal.errors import ConfigError

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: str) -> int:
    """Bits per second.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit")
    (100000000, 2500000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if rate < 10**5:
        raise ConfigError(f"--rates {text}: a rate is like 100mbit or 1gbit, and at least 100kbit.")
    return rate


def show_rate(rate: int) -> str:
    """A rate as people say it.

    >>> show_rate(100_000_000), show_rate(2_500_000_000)
    ('100 Mb/s', '2.5 Gb/s')
    """
    unit, word = (10**9, "Gb/s") if rate >= 10**9 else (10**6, "Mb/s")
    return f"{rate / unit:g} {word}"
