"""How parameter servers did, in a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_servers(facts: Mapping[str, Any]) -> str:
    """What an exchange with servers says of them, for people.

    >>> describe_servers({"staleness": {"0": 75, "1": 25}, "busy": [0.125, 0.1], "workers": 2, "bytes_sent": 3_200_000})
    'servers 12 %, 10 % busy; 2 workers; parts begun 0 steps ahead 75 %, 1: 25 %; 3.2 MB sent by this worker'
    """
    counts = {int(ahead): int(count) for ahead, count in facts["staleness"].items()}
    whole = sum(counts.values()) or 1
    ahead = [f"{steps}: {100 * count / whole:.0f} %" for steps, count in sorted(counts.items())]
    if ahead:
        ahead[0] = ahead[0].replace(":", " steps ahead")
    busy = ", ".join(f"{100 * share:.0f} %" for share in facts["busy"]) or "not yet known to be"
    return (
        f"servers {busy} busy; {facts['workers']} workers; parts begun {', '.join(ahead)}; "
        f"{facts['bytes_sent'] / 1e6:.1f} MB sent by this worker"
    )
