"""Slot: which samples of a step go to which worker. One file a choice; this table is the list of them."""

from __future__ import annotations

from shoal.config import fill_options, parse_choice
from shoal.partition.base import Partition
from shoal.partition.block import BlockPartition
from shoal.partition.bucket import BucketPartition
from shoal.partition.consistent import Consistent
from shoal.partition.feature import Feature
from shoal.partition.hash import Hash
from shoal.partition.random import Random
from shoal.partition.roundrobin import RoundRobin
from shoal.partition.sequential import Sequential
from shoal.table import Table

TABLE: Table[type[Partition]] = Table(
    "partition",
    {
        "block": BlockPartition,
        "sequential": Sequential,
        "roundrobin": RoundRobin,
        "random": Random,
        "hash": Hash,
        "feature": Feature,
        "bucket": BucketPartition,
        "consistent": Consistent,
    },
)


def make_partition(text: str) -> Partition:
    """The partition that a text names, with its options.

    >>> make_partition("bucket(tokens, window=16)")
    BucketPartition(length='tokens', window=16, shares='')
    >>> make_partition("block(shares=2/1/1)").weights(parts=6).tolist()
    [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    """
    choice = parse_choice(text, "partition")
    return fill_options(choice, TABLE.look_up(choice.name))
