"""Slot: how replicas agree on the next parameters. One file a choice; this table is the list of them."""

from __future__ import annotations

import sys

from shoal.config import fill_options
from shoal.exchange.contract import Exchange
from shoal.exchange.ddp import Ddp
from shoal.exchange.diloco import Diloco
from shoal.exchange.local import Local
from shoal.exchange.ps import Ps
from shoal.exchange.setup import Setup
from shoal.exchange.shared import Shared
from shoal.exchange.solo import Solo
from shoal.exchange.zero1 import Zero1
from shoal.exchange.zero2 import Zero2
from shoal.exchange.zero3 import Zero3
from shoal.table import Table
from shoal.types import Choice
from shoal.world.shm.memory import SharedMemoryUnavailable

TABLE: Table[type[Exchange]] = Table(
    "exchange",
    {
        "solo": Solo,
        "ddp": Ddp,
        "zero1": Zero1,
        "zero2": Zero2,
        "zero3": Zero3,
        "shared": Shared,
        "local": Local,
        "diloco": Diloco,
        "ps": Ps,
    },
)


def make_exchange(choice: Choice, setup: Setup) -> Exchange:
    """The exchange a plan names, ready for its first step."""
    chosen = TABLE.look_up(choice.name)
    options: object = fill_options(choice, chosen.Options)
    try:
        return chosen(setup, options)  # type: ignore[call-arg]
    except SharedMemoryUnavailable as reason:
        # zero1 computes the same numbers through messages; every worker gets here together.
        if setup.world.rank == 0:
            print(f"shoal: no shared memory ({reason}); running zero1 instead of {choice}.", file=sys.stderr)
        return Zero1(setup, fill_options(Choice("zero1", choice.args, choice.options), Zero1.Options))
