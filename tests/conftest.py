"""The longest files go first: so that, at the end of a run of several files at a time, nobody waits for one of them."""

from __future__ import annotations

import pytest

LONGEST = (
    "grid",
    "server_kills",
    "simulation",
    "exchanges",
    "any_to_any",
    "hybrids",
    "bits",
    "zero3",
    "examples",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))  # the rest stays in its order
