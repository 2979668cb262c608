"""Every exchange on every toy at every worker count equals one process, in float64."""

from __future__ import annotations

import pytest
import torch

from shoal.exchange import TABLE as EXCHANGES
from shoal.exchange.flat import FlatExchange
from shoal.testing.parity import Trace, largest_difference, run_toy
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.types import Promise
from shoal.world.world import World

SHARED_BY = [name for name, kind in EXCHANGES.items() if name != "solo" and kind.promise is Promise.EXACT]


def run_all_toys(world: World, strategy: str) -> dict[str, Trace]:
    return {name: run_toy(world, toy, strategy) for name, toy in TOYS.items()}


def reference(toy: str, workers: int) -> Trace:
    """One process that cuts each step into the same micro-batches."""
    chosen = TOYS[toy]
    return run_toy(World.alone(), chosen, "solo", accumulate=workers * chosen.accumulate)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", SHARED_BY)
def test_equals_one_process(strategy: str, workers: int) -> None:
    # A small bucket makes several of them even for a toy.
    flat = issubclass(EXCHANGES[strategy], FlatExchange)
    # One server is enough for the numbers; what several do is tested where they are killed.
    servers = ", servers=1" if EXCHANGES[strategy].apart else ""
    traces = spawn(run_all_toys, workers, f"{strategy}(bucket_mb=0.002{servers})" if flat else strategy)
    for toy in TOYS:
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
