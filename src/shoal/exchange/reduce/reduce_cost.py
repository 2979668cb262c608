"""What sums of buckets cost: the traffic of one reduction of all of them, and what compression keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shoal.compress.base import Compressor, Layout
from shoal.cost import NOTHING, Cost
from shoal.exchange.reduce.compressed import equal_hosts, matrices_of
from shoal.world.buckets import Bucket
from shoal.world.traffic import ring_bytes, share_of
from shoal.world.world import World


def reduction_cost(
    world: World,
    compressor: Compressor | None,
    buckets: Sequence[Bucket],
    shapes: Mapping[str, torch.Size],
    scattered: bool,
) -> Cost:
    """One sum of all buckets over the workers; `scattered`: each worker gets its slice of it only.

    With a compressor that is tried first (`auto`), as if it stayed on.
    """
    if compressor is None or world.size == 1:
        count = share_of if scattered else ring_bytes
        return Cost(wire={"data": sum(count(bucket.nbytes, world.size) for bucket in buckets)})
    found = NOTHING
    for bucket in buckets:
        found += _compressed(world, compressor, bucket, shapes, scattered)
    return found


def _compressed(
    world: World, compressor: Compressor, bucket: Bucket, shapes: Mapping[str, torch.Size], scattered: bool
) -> Cost:
    """As `Compressed` sums a bucket: within hosts as it is, between them compressed."""
    hosts = equal_hosts(world)
    local, across = (len(hosts[0]), len(hosts)) if len(hosts) > 1 else (1, world.size)
    part = bucket.size // local
    whole = Layout(part, bucket.dtype, world.device, matrices_of(bucket, shapes) if local == 1 else None)
    sliced = Layout(bucket.size // world.size, bucket.dtype, world.device)
    inside = share_of(bucket.nbytes, local)
    if scattered and compressor.code(sliced).rounds == 1:
        between = compressor.cost(sliced, across, slices=across)
    else:
        between = compressor.cost(whole, across)
        inside *= 1 if scattered else 2
    return between + Cost(wire={"data": inside})
