"""However the samples of a step are divided, the step computes what one process computes, in float64.

With two workers and with three, every partition meets every strategy and every toy, and every strategy every toy: as in
a Latin square, so a third of all triples is enough.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.testing.parity import ParityTrace, largest_difference, toy_order, trace_run
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.run_config import RunConfig
from shoal.world.world import World

TOY_NAMES = ("uneven", "dropout", "accumulated")
"""A last batch too small for some, draws that follow micro-batches, and several micro-batches a worker."""

STRATEGIES = ("ddp(bucket_mb=0.002)", "zero1(bucket_mb=0.002)", "zero3")


def partitions(workers: int) -> list[str]:
    shares = "/".join(str(2 + i) for i in range(workers))
    return [
        "hash(id)",
        "hash(word)",
        "feature(word)",
        "bucket(length, window=2)",
        "consistent(id)",
        "consistent(word, kind=ring)",
        "roundrobin",
        "random",
        "sequential",
        f"block(shares={shares})",
        f"hash(id, shares={shares})",
    ]


def order_of(toy: str, strategy: str, partition: str, accumulate: int | None = None) -> RunConfig:
    samples = TOYS[toy].samples
    lengths = torch.randint(1, 9, (samples,), generator=torch.Generator().manual_seed(1))
    columns: dict[str, Any] = {"length": lengths, "word": [f"w{i % 3}" for i in range(samples)]}
    return replace(toy_order(TOYS[toy], strategy, accumulate), partition=partition, columns=columns)


STEPS = 5


def pairs(strategy: str, workers: int) -> list[tuple[str, str]]:
    """Every partition with one of the toys; under the next strategy with the next toy."""
    first = STRATEGIES.index(strategy)
    return [(TOY_NAMES[(first + i) % 3], partition) for i, partition in enumerate(partitions(workers))]


def run_them(world: World, strategy: str) -> dict[tuple[str, str], ParityTrace]:
    return {
        (toy, partition): trace_run(world, order_of(toy, strategy, partition), STEPS)
        for toy, partition in pairs(strategy, world.size)
    }


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_one_process(strategy: str, workers: int) -> None:
    traces = spawn(run_them, workers, strategy)
    for toy, partition in pairs(strategy, workers):
        order = order_of(toy, "solo", partition, workers * TOYS[toy].accumulate)
        wanted = trace_run(World.alone(), order, STEPS)
        for rank, found in enumerate(traces):
            gap, where = largest_difference(wanted, found[toy, partition])
            place = f"{toy} under {strategy} and {partition}, {workers} workers, rank {rank}"
            assert gap < 1e-12, f"{place}: {gap:.2e} at {where}"


def test_a_partition_changes_who_computes_and_not_what() -> None:
    """Without draws, the losses of a step are those of any other division; only bucket has steps of its own."""
    plain = trace_run(World.alone(), order_of("odd", "solo", "block", 3), STEPS)
    for partition in partitions(3):
        found = trace_run(World.alone(), order_of("odd", "solo", partition, 3), STEPS)
        gap, where = largest_difference(plain, found)
        if partition.startswith("bucket"):
            assert gap > 1e-6
        else:
            assert gap < 1e-12, f"{partition}: {gap:.2e} at {where}"
