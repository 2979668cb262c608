"""In fp32 and deterministic mode, ddp, zero1, zero2, shared and ps agree bit for bit at the same worker count."""

from __future__ import annotations

import pytest
import torch

from shoal.testing.parity import Trace, largest_difference, run_toy
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.world.world import World

STEPS = 8
EXCHANGES = ("ddp", "zero1", "zero2", "shared", "ps")


def strategy(name: str) -> str:
    """Small buckets, so that even a toy has several; one server, whose numbers are those of many."""
    return f"{name}(bucket_mb=0.002{', servers=1' if name == 'ps' else ''})"


def run_everything(world: World) -> dict[str, dict[str, Trace]]:
    return {
        toy: {
            name: run_toy(world, chosen, strategy(name), STEPS, precision="fp32", deterministic=True)
            for name in EXCHANGES
        }
        for toy, chosen in TOYS.items()
    }


@pytest.mark.parametrize(("workers", "backend"), [(2, "auto"), (3, "auto"), (4, "auto"), (3, "gloo")])
def test_exchanges_agree_bit_for_bit(workers: int, backend: str) -> None:
    for traces in spawn(run_everything, workers, backend=backend):
        for toy, by_exchange in traces.items():
            first = by_exchange["ddp"]
            for name, trace in by_exchange.items():
                assert trace.losses == first.losses, f"{toy}: losses of {name}"
                for key, value in first.parameters.items():
                    assert torch.equal(trace.parameters[key], value), f"{toy}: {key} under {name}"


def run_in_float64(world: World) -> dict[str, dict[str, Trace]]:
    return {
        toy: {
            name: run_toy(world, chosen, f"{name}(bucket_mb=0.002)", STEPS)
            for name in EXCHANGES
            if name != "ps"
        }
        for toy, chosen in TOYS.items()
    }


@pytest.mark.parametrize("hosts", [["a", "a", "b", "b"], ["a", "b", "c"]])
def test_several_hosts_equal_one_process(hosts: list[str]) -> None:
    parts = {toy: len(hosts) * chosen.accumulate for toy, chosen in TOYS.items()}
    wanted = {t: run_toy(World.alone(), TOYS[t], "solo", STEPS, accumulate=n) for t, n in parts.items()}
    for traces in spawn(run_in_float64, len(hosts), hosts=hosts):
        for toy, by_exchange in traces.items():
            for name, found in by_exchange.items():
                gap, where = largest_difference(wanted[toy], found)
                assert gap < 1e-12, f"{toy} under {name} on hosts {hosts}: {gap:.2e} at {where}"
