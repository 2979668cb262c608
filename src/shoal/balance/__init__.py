"""Slot: how much of each step a worker gets. One file a choice; this table is the list of them."""

from __future__ import annotations

from shoal.balance.base import Balance
from shoal.balance.dynamic import Dynamic
from shoal.balance.even import Even
from shoal.balance.history import History
from shoal.balance.predict import Predict
from shoal.balance.static import Static
from shoal.config import fill_options, parse_choice
from shoal.table import Table

TABLE: Table[type[Balance]] = Table(
    "balance",
    {"even": Even, "static": Static, "dynamic": Dynamic, "history": History, "predict": Predict},
)


def make_balance(text: str) -> Balance:
    """The balance that a text names, with its options.

    >>> make_balance("static(shares=3/1)").given
    (3.0, 1.0)
    >>> make_balance("dynamic(band=0.05)")
    Dynamic(every=5, band=0.05, most='')
    """
    choice = parse_choice(text, "balance")
    return fill_options(choice, TABLE.look_up(choice.name))
