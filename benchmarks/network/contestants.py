"""Who takes part: torch's own DDP with and without its hooks, and strategies of Shoal as a user writes them.

When to use: to add a peer, or to see with which settings one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal import compress, exchange
from shoal.config import fill_options
from shoal.errors import ConfigError
from shoal.exchange.reduce import autotune
from shoal.plan.check import check_text
from shoal.table import Table
from shoal.types import Plan

WORKERS = 2
"""One on each host."""
BASELINE = "torch ddp"
"""What all others are compared with."""

PEERS: Table[str] = Table(
    "peer",
    {
        BASELINE: "DistributedDataParallel on gloo",
        "torch ddp fp16": "with fp16_compress_hook",
        "torch ddp powersgd": "with powerSGD_hook of rank 4, from its third step on",
    },
)

STRATEGIES = (
    "ddp",
    "ddp + auto",
    "ddp + bf16",
    "ddp + int8",
    "ddp + int4",
    "ddp + topk(0.01)",
    "ddp + powersgd(4)",
    "ddp + sign",
    "zero1 + int8",
    "local(16)",
    "diloco(50)",
    "diloco(50) + int8",
)


@dataclass(frozen=True)
class Contestant:
    """One way to train, by name."""

    name: str
    strategy: str = ""
    """Of Shoal; empty for a peer."""
    period: int = 1
    """Its steps repeat after so many: only whole periods have a time that means something."""
    warmup: int = 3
    """Steps before the first that counts."""

    @property
    def peer(self) -> bool:
        """Whether it is somebody else's."""
        return not self.strategy


def contestants(names: Sequence[str]) -> tuple[Contestant, ...]:
    """Contestants by name, each a peer or a strategy; torch DDP is always among them, for all are compared with it.

    >>> [one.name for one in contestants(["zero1", "torch ddp", "zero1"])]
    ['torch ddp', 'zero1']
    """
    wanted = dict.fromkeys([BASELINE, *names])
    return tuple(_contestant(name) for name in wanted)


def _contestant(name: str) -> Contestant:
    if name in PEERS:
        return Contestant(name)
    if name.startswith(BASELINE):
        PEERS.look_up(name)  # says which there are
    plan = check_text(name, WORKERS)
    chosen = exchange.TABLE.look_up(plan.exchange.name)
    if chosen.uses_servers:
        raise ConfigError(
            f"{plan}: the network benchmark starts workers and no servers; leave {plan.exchange.name} out."
        )
    return Contestant(str(plan), str(plan), period_of(plan), _warmup(plan))


def period_of(plan: Plan) -> int:
    """After how many steps its workers have met once.

    >>> from shoal.config import parse_strategy
    >>> period_of(parse_strategy("local(16)")), period_of(parse_strategy("ddp"))
    (16, 1)
    """
    options: object = fill_options(plan.exchange, exchange.TABLE.look_up(plan.exchange.name).Options)
    return int(getattr(options, "every", 1))


def _warmup(plan: Plan) -> int:
    """The first steps allocate and connect; a compressor that is tried out first takes as long as its trial."""
    if plan.compressor is not None and compress.TABLE.look_up(plan.compressor.name).tried:
        return autotune.WARM_UP + 2 * autotune.STEPS * autotune.ROUNDS + 1
    return 3
