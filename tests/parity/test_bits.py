"""In fp32 and deterministic mode, ddp, zero1, zero2 and shared agree bit for bit at the same worker count."""

from __future__ import annotations

import pytest
import torch

from shoal.testing.parity import Trace, run_toy
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.world.world import World

EXCHANGES = ("ddp", "zero1", "zero2", "shared")


def run_everything(world: World) -> dict[str, dict[str, Trace]]:
    return {
        toy: {
            name: run_toy(world, chosen, f"{name}(bucket_mb=0.002)", precision="fp32", deterministic=True)
            for name in EXCHANGES
        }
        for toy, chosen in TOYS.items()
    }


@pytest.mark.parametrize(("workers", "hosts", "backend"), [(2, 1, "auto"), (3, 1, "auto"), (4, 2, "auto"), (3, 1, "gloo")])
def test_exchanges_agree_bit_for_bit(workers: int, hosts: int, backend: str) -> None:
    names = [f"host{rank * hosts // workers}" for rank in range(workers)]
    for traces in spawn(run_everything, workers, hosts=names, backend=backend):
        for toy, by_exchange in traces.items():
            first = by_exchange["ddp"]
            for name, trace in by_exchange.items():
                assert trace.losses == first.losses, f"{toy}: losses of {name}"
                for key, value in first.parameters.items():
                    assert torch.equal(trace.parameters[key], value), f"{toy}: {key} under {name}"
