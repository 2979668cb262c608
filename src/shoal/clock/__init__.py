"""Slot: how stale may a worker's parameters be. One file a choice; this table is the list of them."""

from __future__ import annotations

from shoal.clock.asp import Asp
from shoal.clock.base import Clock
from shoal.clock.bsp import Bsp
from shoal.clock.ssp import Ssp
from shoal.errors import ConfigError
from shoal.table import Table

TABLE: Table[type[Clock]] = Table("clock", {"bsp": Bsp, "ssp": Ssp, "asp": Asp})


def make_clocks(first: str, steps: int | None, then: str, after: int) -> list[tuple[int, Clock]]:
    """The clocks of a run, each with the step from which it holds.

    >>> [(step, clock.window) for step, clock in make_clocks("bsp", 3, "ssp", 100)]
    [(0, 0), (100, 3)]
    >>> [(step, clock.window) for step, clock in make_clocks("", 4, "", 0)]
    [(0, 4)]
    """
    if steps is not None and steps < 0:
        raise ConfigError(f"ssp={steps}; a worker may be 0 or more steps ahead.")
    if bool(then) != (after > 0):
        raise ConfigError(
            f"then={then or 'nothing'}, after={after}; a second clock needs both, as in then=asp, after=100."
        )
    names = [first or ("bsp" if steps is None else "ssp"), *([then] if then else [])]
    if "ssp" in names and steps is None:
        raise ConfigError("ssp needs a number of steps, as in ssp=4.")
    if "ssp" not in names and steps is not None:
        raise ConfigError(f"ssp={steps} has no meaning for {' and '.join(names)}; leave one out.")
    made = [TABLE.look_up(name)(steps or 0) for name in names]
    if steps == 0:  # nobody ahead of anybody: that is bsp
        made = [Bsp() if isinstance(clock, Ssp) else clock for clock in made]
    return list(zip([0, after], made, strict=False))
