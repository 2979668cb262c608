"""Plain SQL over data sets: what stands in quotes after FROM or JOIN is read, whichever engine answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.data.flow.flow import Flow

_QUOTED = re.compile(r"\b(from|join)\s+'((?:[^']|'')+)'", re.IGNORECASE)


def with_views(query: str, read: Callable[[str], Flow]) -> tuple[str, list[Flow]]:
    """The query with the names of views in place of addresses, and what was read."""
    flows: list[Flow] = []

    def view(match: re.Match[str]) -> str:
        flows.append(read(match[2].replace("''", "'")))
        return f"{match[1]} {flows[-1].table.get_name()}"

    return _QUOTED.sub(view, query), flows
