"""Two levels: workers of a host sum in shared memory, and one stream leaves the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.server.processes import Threads
from shoal.server.transport.keys import JobKeys
from shoal.testing.parity import largest_difference, run_toy, take_step, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.world.world import World

HOSTS = ["a", "a", "b", "b"]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[str]:
    """Where servers of this process are, as `ps(...)` is told."""
    keys = JobKeys.make()
    keys.write(tmp_path / "keys")
    started = Threads(2, keys)
    yield f"at={started.address.removeprefix('tcp://')}, keys={tmp_path / 'keys'}"
    started.close()


@pytest.mark.parametrize("toy", ["odd", "accumulated", "unused"])
def test_equals_one_process(servers: str, toy: str) -> None:
    wanted = run_toy(World.alone(), TOYS[toy], "solo", accumulate=4 * TOYS[toy].accumulate)
    strategy = f"ps(tier=host, bucket_mb=0.002, {servers})"
    for found in spawn(run_toy, 4, TOYS[toy], strategy, hosts=HOSTS):
        gap, where = largest_difference(wanted, found)
        assert gap < 1e-12, f"{gap:.2e} at {where}"


def sent(world: World, strategy: str) -> tuple[int, int, bool]:
    """Bytes that a worker sends in a step, bytes of all buckets, and whether parameters are where the leader's are.

    In the quietest step of several: what is not answered soon is sent again.
    """
    parts = toy_parts(world, TOYS["stack"], strategy)
    try:
        bytes_sent = min([take_step(parts, number).bytes_sent for number in range(5)][1:])
        first = next(iter(parts.exchange.trained.values()))  # type: ignore[attr-defined]
        world.barrier()
        if world.rank % 2 == 0:
            first.data.fill_(7.0)
        world.barrier()
        total = sum(bucket.nbytes for bucket in parts.exchange.buckets)  # type: ignore[attr-defined]
        return bytes_sent, total, bool(torch.all(first.data == 7.0))
    finally:
        parts.exchange.close()


def test_one_stream_leaves_the_host(servers: str) -> None:
    found = spawn(sent, 4, f"ps(tier=host, {servers})", hosts=HOSTS)
    for rank, (bytes_sent, total, same) in enumerate(found):
        assert same, "the workers of a host hold one copy of the parameters"
        if rank % 2:
            assert bytes_sent < total / 5, "only the leader talks to servers; the rest is the host's own"
        else:
            assert total <= bytes_sent <= 1.4 * total


def test_a_stale_clock_learns_too(servers: str) -> None:
    found = spawn(run_toy, 4, TOYS["odd"], f"ps(ssp=2, tier=host, {servers})", 20, None, "fp64", hosts=HOSTS)
    first, last = sum(found[0].losses[:6]), sum(found[0].losses[-6:])
    assert last < first


def test_equals_one_process_without_a_tier(servers: str) -> None:
    wanted = run_toy(World.alone(), TOYS["odd"], "solo", accumulate=4 * TOYS["odd"].accumulate)
    for found in spawn(run_toy, 4, TOYS["odd"], f"ps(bucket_mb=0.002, {servers})", hosts=HOSTS):
        gap, where = largest_difference(wanted, found)
        assert gap < 1e-12, f"{gap:.2e} at {where}"
