"""Slot: from the gradients of a step's parts to one. One file a choice; this table is the list of them."""

from __future__ import annotations

from shoal.aggregate.base import Aggregate
from shoal.aggregate.mean import Mean
from shoal.aggregate.median import Median
from shoal.aggregate.trimmed import Trimmed
from shoal.aggregate.weighted import Weighted
from shoal.config import fill_options, parse_choice
from shoal.table import Table

TABLE: Table[type[Aggregate]] = Table(
    "aggregate", {"weighted": Weighted, "mean": Mean, "median": Median, "trimmed": Trimmed}
)


def make_aggregate(text: str) -> Aggregate:
    """The aggregate that a text names, with its options.

    >>> make_aggregate("trimmed(0.1)")
    Trimmed(ratio=0.1)
    """
    choice = parse_choice(text, "aggregate")
    return fill_options(choice, TABLE.look_up(choice.name))
