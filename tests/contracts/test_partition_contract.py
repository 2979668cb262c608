"""What every partition must keep, whoever adds one: tested over the table."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.partition
from shoal.data.loader import Feed, Loader
from shoal.partition import TABLE, make_partition
from shoal.partition.base import Partition
from shoal.types import Promise

NAMES = list(TABLE)


def text_of(name: str, shares: str = "", column: str = "id") -> str:
    """A choice with its shares, and with a column where it takes one."""
    takes = [
        field.name
        for field in dataclasses.fields(TABLE[name])
        if field.name not in ("shares", "window", "kind")
    ]
    inside = [f"{option}={column}" for option in takes] + ([f"shares={shares}"] if shares else [])
    return f"{name}({', '.join(inside)})" if inside else name


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 200),
    weights=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=7),
    kinds=st.integers(1, 50),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_disjoint_and_covering(
    name: str, count: int, weights: list[float], kinds: int, seed: int, data: st.DataObject
) -> None:
    ids = np.array(data.draw(st.permutations(range(0, 3 * count, 3))), dtype=np.int64)
    keys = np.random.default_rng(seed).integers(0, kinds, count)
    partition = make_partition(text_of(name))
    kept = ids.copy(), keys.copy()
    parts = partition.divide(ids, keys, np.array(weights), seed)
    assert len(parts) == len(weights)
    assert sorted(np.concatenate(parts).tolist()) == sorted(ids.tolist()), "each sample goes to one part"
    assert all(part.dtype == np.int64 for part in parts)
    assert (ids == kept[0]).all()
    assert (keys == kept[1]).all()
    again = partition.divide(ids, keys, np.array(weights), seed)
    assert [part.tolist() for part in again] == [part.tolist() for part in parts], "a pure function"
    if partition.counted:
        fair = count * np.array(weights) / sum(weights)
        assert (np.abs(np.array([len(part) for part in parts]) - fair) < 1).all()
    cuts = partition.cuts(count, np.array(weights))
    if cuts is not None:
        assert [ids[a:b].tolist() for a, b in cuts] == [part.tolist() for part in parts]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 90),
    share=st.floats(0.05, 1.0),
    size=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    weighted=st.booleans(),
)
def test_workers_together_have_each_sample_once(
    name: str, count: int, share: float, size: int, accumulate: int, seed: int, shuffle: bool, weighted: bool
) -> None:
    batch = max(1, int(count * share))
    partition = make_partition(
        text_of(name, "/".join("231"[i % 3] for i in range(size)) if weighted else "", "key")
    )
    columns = {"key": [(7 * i) % 11 for i in range(count)]}
    feeds = [
        Feed(range(count), batch, rank, size, accumulate, seed, shuffle, partition=partition, columns=columns)
        for rank in range(size)
    ]
    loaders = [Loader(feed) for feed in feeds]
    one = Loader(dataclasses.replace(feeds[0], size=1, rank=0, accumulate=size * accumulate))
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * one.steps_per_epoch, (epoch + 1) * one.steps_per_epoch):
            batches = [batch for loader in loaders for batch in loader.take(step).batches]
            found = [[] if batch is None else batch.tolist() for batch in batches]
            alone = [[] if batch is None else batch.tolist() for batch in one.take(step).batches]
            assert found == alone, "one process computes the same micro-batches"
            seen += [i for ids in found for i in ids]
        assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("name", NAMES)
def test_facts(name: str) -> None:
    chosen = TABLE[name]
    assert chosen.promise is Promise.EXACT
    assert chosen.summary
    assert "shares" in {field.name for field in dataclasses.fields(chosen)}, (
        "each divides among unequal workers"
    )
    assert chosen.__module__ == f"shoal.partition.{name}"
    assert "When to use" in (importlib.import_module(chosen.__module__).__doc__ or "")


def test_every_partition_is_in_the_table() -> None:
    found = set()
    for file in Path(shoal.partition.__file__).parent.glob("*.py"):
        name = "" if file.stem == "__init__" else f".{file.stem}"
        for thing in vars(importlib.import_module(f"shoal.partition{name}")).values():
            if inspect.isclass(thing) and issubclass(thing, Partition) and not inspect.isabstract(thing):
                found.add(thing)
    assert found == set(TABLE.values())
