"""Slot: how stale may a worker's parameters be. One file a choice; this table is the list of them."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.clock.asp import Asp
from shoal.clock.base import Clock
from shoal.clock.bsp import Bsp
from shoal.clock.dssp import Dssp
from shoal.clock.ssp import Ssp
from shoal.config import fill_options, parse_choice
from shoal.errors import ConfigError
from shoal.table import Table

TABLE: Table[type[Clock]] = Table("clock", {"bsp": Bsp, "ssp": Ssp, "asp": Asp, "dssp": Dssp})


def make_clock(text: str) -> Clock:
    """The clock that a text names, with its options.

    >>> print(make_clock("ssp(4)"), make_clock("ssp(0)"))
    ssp(4) bsp
    """
    choice = parse_choice(text, "clock")
    if choice.name == "ssp" and not (choice.args or choice.options):
        raise ConfigError("ssp needs a number of steps, as in ssp=4.")
    made = fill_options(choice, TABLE.look_up(choice.name))
    # Nobody ahead of anybody: that is bsp.
    return Bsp() if isinstance(made, Ssp) and not made.steps else made


def make_clocks(first: str, steps: int | None, then: str, after: int) -> list[tuple[int, Clock]]:
    """The clocks of a run, each with the step from which it holds. `steps` is the option of an `ssp` without one.

    >>> [(step, str(clock)) for step, clock in make_clocks("bsp", 3, "ssp", 100)]
    [(0, 'bsp'), (100, 'ssp(3)')]
    >>> [(step, str(clock)) for step, clock in make_clocks("", 4, "", 0)]
    [(0, 'ssp(4)')]
    """
    if bool(then) != (after > 0):
        raise ConfigError(
            f"then={then or 'nothing'}, after={after}; a second clock needs both, as in then=asp, after=100."
        )
    names = [first or ("bsp" if steps is None else "ssp"), *([then] if then else [])]
    if steps is not None:
        if "ssp" not in names:
            raise ConfigError(f"ssp={steps} has no meaning for {' and '.join(names)}; leave one out.")
        names = [f"ssp({steps})" if name == "ssp" else name for name in names]
    return list(zip([0, after], map(make_clock, names), strict=False))


def clock_at(clocks: Sequence[tuple[int, Clock]], step: int) -> Clock:
    """The clock that holds for a step: the last that begins at or before it."""
    return [clock for begin, clock in clocks if begin <= step][-1]
