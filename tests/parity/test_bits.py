"""In fp32 and deterministic mode, ddp, zero1, zero2, shared and ps agree bit for bit at the same worker count: on every
toy with three workers, otherwise on the toys whose numbers can depend on how many there are."""

from __future__ import annotations

import pytest
import torch
from sized import SIZED

from shoal.testing.parity import ParityTrace, largest_difference, run_toy
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.world.world import World

STEPS = 4
"""One more than the longest epoch of a toy."""
EXCHANGES = ("ddp", "zero1", "zero2", "shared", "ps")


def strategy(name: str) -> str:
    """Small buckets, so that even a toy has several; one server, whose numbers are those of many."""
    return f"{name}(bucket_mb=0.002{', servers=1' if name == 'ps' else ''})"


def run_everything(world: World, toys: list[str]) -> dict[str, dict[str, ParityTrace]]:
    return {
        toy: {
            name: run_toy(world, TOYS[toy], strategy(name), STEPS, precision="fp32", deterministic=True)
            for name in EXCHANGES
        }
        for toy in toys
    }


@pytest.mark.parametrize(("workers", "backend"), [(2, "auto"), (3, "auto"), (4, "auto"), (3, "gloo")])
def test_exchanges_agree_bit_for_bit(workers: int, backend: str) -> None:
    toys = list(TOYS) if (workers, backend) == (3, "auto") else SIZED
    for traces in spawn(run_everything, workers, toys, backend=backend):
        assert list(traces) == toys
        for toy, by_exchange in traces.items():
            first = by_exchange["ddp"]
            for name, trace in by_exchange.items():
                assert trace.losses == first.losses, f"{toy}: losses of {name}"
                for key, value in first.parameters.items():
                    assert torch.equal(trace.parameters[key], value), f"{toy}: {key} under {name}"


def run_in_float64(world: World, toys: list[str]) -> dict[str, dict[str, ParityTrace]]:
    return {
        toy: {
            name: run_toy(world, TOYS[toy], f"{name}(bucket_mb=0.002)", STEPS)
            for name in EXCHANGES
            if name != "ps"
        }
        for toy in toys
    }


@pytest.mark.parametrize(
    ("hosts", "toys"), [(["a", "a", "b", "b"], list(TOYS)), (["a", "b", "c"], SIZED)], ids=["2 x 2", "3 x 1"]
)
def test_several_hosts_equal_one_process(hosts: list[str], toys: list[str]) -> None:
    parts = {toy: len(hosts) * TOYS[toy].accumulate for toy in toys}
    wanted = {t: run_toy(World.alone(), TOYS[t], "solo", STEPS, accumulate=n) for t, n in parts.items()}
    for traces in spawn(run_in_float64, len(hosts), toys, hosts=hosts):
        assert list(traces) == toys
        for toy, by_exchange in traces.items():
            for name, found in by_exchange.items():
                gap, where = largest_difference(wanted[toy], found)
                assert gap < 1e-12, f"{toy} under {name} on hosts {hosts}: {gap:.2e} at {where}"
