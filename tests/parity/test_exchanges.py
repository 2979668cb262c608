"""Every exchange equals one process, in float64: on every toy with three workers, which divide nothing evenly, and with
one, two and four on the toys whose numbers can depend on it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from sized import SIZED

from shoal.exchange import TABLE as EXCHANGES
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.testing.parity import ParityTrace, largest_difference, run_toy
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.types import Promise
from shoal.world.world import World

SHARED_BY = [name for name, kind in EXCHANGES.items() if name != "solo" and kind.promise is Promise.EXACT]

STEPS = 6
"""Two epochs of the toys with a last batch that is too small, three of the others."""


def run_toys(world: World, strategy: str, names: list[str]) -> dict[str, ParityTrace]:
    return {name: run_toy(world, TOYS[name], strategy, STEPS) for name in names}


@cache
def reference(toy: str, workers: int) -> ParityTrace:
    """One process that cuts each step into the same micro-batches."""
    chosen = TOYS[toy]
    return run_toy(World.alone(), chosen, "solo", STEPS, accumulate=workers * chosen.accumulate)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", SHARED_BY)
def test_equals_one_process(strategy: str, workers: int) -> None:
    # A small bucket makes several of them even for a toy.
    flat = issubclass(EXCHANGES[strategy], BucketedExchange)
    # One server is enough for the numbers; what several do is tested where they are killed.
    servers = ", servers=1" if EXCHANGES[strategy].uses_servers else ""
    text = f"{strategy}(bucket_mb=0.002{servers})" if flat else strategy
    toys = list(TOYS) if workers == 3 else SIZED
    traces = spawn(run_toys, workers, text, toys)
    for toy in toys:
        wanted = reference(toy, workers)
        for rank, found in enumerate(traces):
            gap, where = largest_difference(wanted, found[toy])
            assert gap < 1e-12, (
                f"{toy} under {strategy} with {workers} workers, rank {rank}: {gap:.2e} at {where}"
            )
            assert found[toy].losses == traces[0][toy].losses
            assert found[toy].state.keys() == wanted.state.keys()
            for name, entries in wanted.state.items():
                for key, value in entries.items():
                    torch.testing.assert_close(found[toy].state[name][key], value, rtol=1e-10, atol=1e-12)
