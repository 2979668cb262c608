"""Which cells of a product are run by default: some in which each pair of values still meets; `--all` runs them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Cell = tuple[Any, ...]


def pairs_of(cell: Cell) -> set[tuple[int, Any, int, Any]]:
    """Every two values of a cell, with the axes that they are of."""
    return {(i, cell[i], j, cell[j]) for i, j in combinations(range(len(cell)), 2)}


def covering(cells: Sequence[Cell], pairs: Callable[[Cell], set[Any]] = pairs_of) -> list[Cell]:
    """Few of these cells, in their order, with every pair of values that occurs in any of them: always the same ones.

    >>> len(covering(list(product("abc", "xyz", [1, 2, 3]))))
    9
    """
    missing = set[Any]().union(*map(pairs, cells))
    chosen = set[int]()
    while missing:
        best = max(
            range(len(cells)), key=lambda place: len(pairs(cells[place]) & missing)
        )  # the first of equals
        chosen.add(best)
        missing -= pairs(cells[best])
    return [cell for place, cell in enumerate(cells) if place in chosen]


def marked(cells: Sequence[Cell]) -> list[Any]:
    """For `parametrize`: all cells, of which those that `covering` leaves out are run by `--all` only."""
    kept = covering(cells)
    return [cell if cell in kept else pytest.param(*cell, marks=pytest.mark.all_only) for cell in cells]


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """`marked` of a whole product."""
    return marked(list(product(*axes)))
