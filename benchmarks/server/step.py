"""A training step of the 20 M transformer under `ps`, beside `ddp` and beside compute alone.

    scripts/bench server step

Goals: `ps(bsp)` takes at most 1.3 times as long as `ddp`, and as with one copy of each shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.report.result import Section
from benchmarks.workload.servers import Servers
from benchmarks.workload.transformer import CONTEXT, Case, compute_loop, shoal_loop
from benchmarks.workload.turns import Ratio, Seen, goals_of_turns, section_of_turns, take_turns
from shoal.testing.spawn import spawn
from shoal.world.world import World

GOALS: list[Ratio] = [("ps(bsp)", "ddp", 1.3), ("ps(bsp)", "ps(bsp, replicas=1)", 1.3)]


def contest(
    world: World, case: Case, strategies: dict[str, str], servers: dict[str, list[int]], turns: int
) -> dict[str, Seen]:
    """Steps of all, in turns."""
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], None]] = {"compute": compute_loop(world, case)}
    for name, strategy in strategies.items():
        makers[name] = shoal_loop(world, case, strategy)
    servers = servers if world.rank == 0 else {}  # count them once
    return take_turns(makers, turns, servers, world.barrier)


def measure(turns: int) -> Iterator[Section]:
    """One table."""
    case = Case("20M", 8)
    with Servers() as one, Servers() as two:
        strategies = {
            "ddp": "ddp",
            "ps(bsp, replicas=1)": f"ps(bsp, replicas=1, {one.options})",
            "ps(bsp)": f"ps(bsp, {two.options})",
        }
        servers = {"ps(bsp, replicas=1)": one.pids, "ps(bsp)": two.pids}
        first, second = spawn(contest, 2, case, strategies, servers, turns, timeout=1800)
    for name, times in first.items():
        times.work = [a + b for a, b in zip(times.work, second[name].work, strict=True)]
    title = f"a step: 20 M parameters, 2 workers, batch {case.batch}×{CONTEXT} a worker, 2 servers"
    yield replace(section_of_turns(title, first, "ddp"), goals=goals_of_turns(first, GOALS))
