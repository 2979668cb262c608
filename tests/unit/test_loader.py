"""The loader: each sample of a step goes to one worker, and the step is the same however it is divided."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from shoal.data.batch import convert, default_inputs, length
from shoal.data.loader import Feed, Loader
from shoal.data.order import GlobalOrder
from shoal.data.source import fetch
from shoal.errors import ConfigError


def samples_of(loader: Loader, step: int) -> list[list[int]]:
    """The sample ids of each of a worker's micro-batches; the data set is its own ids."""
    return [[] if batch is None else batch.tolist() for batch in loader.take(step).batches]


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 90),
    share=st.floats(0.02, 1.0),
    size=st.integers(1, 5),
    accumulate=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_portions_are_disjoint_and_cover(
    count: int, share: float, size: int, accumulate: int, shuffle: bool, seed: int
) -> None:
    batch = max(1, int(count * share))
    feeds = [Feed(list(range(count)), batch, rank, size, accumulate, seed, shuffle) for rank in range(size)]
    loaders = [Loader(feed) for feed in feeds]
    steps = loaders[0].steps_per_epoch
    assert steps == -(-count // batch)
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            micro = [ids for loader in loaders for ids in samples_of(loader, step)]
            assert len(micro) == size * accumulate
            lengths = [len(ids) for ids in micro]
            assert max(lengths) - min(lengths) <= 1
            flat = [i for ids in micro for i in ids]
            start = len(seen)
            portion = loaders[0].take(step)
            assert (portion.epoch, portion.samples) == (epoch, len(flat))
            order = GlobalOrder(count, seed, shuffle)
            wanted = order.ids(epoch, start, start + len(flat))
            assert flat == wanted.tolist(), "the global batch is a stretch of the order, cut in rank order"
            seen += flat
        assert sorted(seen) == list(range(count)), "each sample once an epoch"


def test_micro_batches_depend_only_on_workers_times_accumulate() -> None:
    def cut(size: int, accumulate: int) -> list[list[list[int]]]:
        loaders = [Loader(Feed(list(range(53)), 13, rank, size, accumulate)) for rank in range(size)]
        assert [loader.take(0).first for loader in loaders] == [rank * accumulate for rank in range(size)]
        return [[ids for loader in loaders for ids in samples_of(loader, step)] for step in range(8)]

    assert cut(1, 6) == cut(2, 3) == cut(3, 2) == cut(6, 1)


def test_an_uneven_last_batch_leaves_some_workers_without_samples() -> None:
    loaders = [Loader(Feed(list(range(14)), 12, rank, 3, shuffle=False)) for rank in range(3)]
    assert [samples_of(loader, 1) for loader in loaders] == [[[12]], [[13]], [[]]]
    assert [loader.take(1).samples for loader in loaders] == [2, 2, 2]


def test_steps_may_be_taken_in_any_order() -> None:
    feed = Feed(list(range(20_000)), 300, 1, 2, seed=4)
    steps = [66, 0, 133, 1, 67, 30]
    together = Loader(feed)
    for step in steps:
        assert samples_of(together, step) == samples_of(Loader(feed), step)


class Drawn(Dataset[tuple[int, torch.Tensor]]):
    """Augmentation: each sample draws."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(2)


def drawn(loader: Loader, steps: range) -> list[list[list[float]]]:
    return [
        [part.tolist() for batch in loader.take(step).batches if batch is not None for part in batch]
        for step in steps
    ]


def test_loader_processes_give_the_same_batches() -> None:
    here = Loader(Feed(Drawn(), 4, 0, 2, 2))
    apart = Loader(Feed(Drawn(), 4, 0, 2, 2, workers=2))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = drawn(apart, range(9))
    assert torch.equal(torch.get_rng_state(), before), "the training process draws what it drew without them"
    assert found == drawn(here, range(9))
    assert drawn(apart, range(3, 5)) == drawn(here, range(3, 5)), "a jump starts the processes anew"
    before_end = time.monotonic()
    del apart
    assert time.monotonic() - before_end < 3.0, "they end with their loader, without waiting for a deadline"
    assert multiprocessing.active_children() == []


def test_what_a_sample_draws_depends_on_its_micro_batch_alone() -> None:
    one = drawn(Loader(Feed(Drawn(), 8, 0, 1, 4)), range(6))
    ranks = [drawn(Loader(Feed(Drawn(), 8, rank, 2, 2)), range(6)) for rank in range(2)]
    assert one == [first + second for first, second in zip(*ranks, strict=True)]
    torch.manual_seed(99)
    assert drawn(Loader(Feed(Drawn(), 8, 0, 1, 4)), range(6)) == one
    assert one[0] != one[3], "but not on the epoch's other steps"


class Pair(NamedTuple):
    x: Any
    y: Any


class Many(Dataset[int]):
    """Fetches several samples at once, as torch's own protocol has it."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(indices)
        return [10 * i for i in indices]


def test_kinds_of_batches() -> None:
    ids = np.array([3, 1])
    x = torch.arange(10.0)
    assert fetch(x, ids, None).tolist() == [3.0, 1.0]
    first, second = fetch([(float(i), i) for i in range(10)], ids, None)
    assert (first.tolist(), second.tolist()) == ([3.0, 1.0], [3, 1])
    named = fetch([{"inputs": i, "deep": {"y": [i, -i]}} for i in range(10)], ids, None)
    assert named["inputs"].tolist() == [3, 1]
    assert named["deep"]["y"][1].tolist() == [-3, -1]
    table = fetch(TensorDataset(x, -x), ids, None)
    assert [t.tolist() for t in table] == [[3.0, 1.0], [-3.0, -1.0]]
    pair = fetch([Pair(i, 2 * i) for i in range(10)], ids, None)
    assert isinstance(convert(pair, torch.device("cpu"), torch.float64), Pair)
    many = Many()
    assert fetch(many, ids, None).tolist() == [30, 10]
    assert many.asked == [[3, 1]]
    for collated in (fetch(table_data, ids, sum) for table_data in ([1, 2, 3, 4], many)):
        assert collated in (6, 40)
    stacked = fetch(TensorDataset(x, -x), ids, lambda rows: torch.stack([a - b for a, b in rows]))
    assert stacked.tolist() == [6.0, 2.0], "a collate of the user's own sees single samples"


def test_batches_are_converted_and_measured() -> None:
    batch = {"inputs": torch.zeros(3, 2), "ids": [torch.zeros(3, dtype=torch.int64)], "name": "x"}
    changed = convert(batch, torch.device("cpu"), torch.float64)
    assert (changed["inputs"].dtype, changed["ids"][0].dtype) == (torch.float64, torch.int64)
    assert changed["name"] == "x"
    assert length(batch) == 3
    assert default_inputs(batch) is batch["inputs"]
    assert default_inputs((1, 2)) == 1
    assert default_inputs(7) == 7
    with pytest.raises(ConfigError, match=r"a dict with \['x'\], without 'inputs'"):
        default_inputs({"x": 1})
    with pytest.raises(ConfigError, match="holds no tensor with a sample dimension"):
        length({"x": "text"})


@pytest.mark.parametrize(
    ("data", "batch", "words"),
    [
        (
            [1, 2, 3],
            4,
            "the data set has 3 samples, fewer than one global_batch of 4; use global_batch=3 or less.",
        ),
        ([], 4, "the data set has 0 samples"),
        ([1], 0, "global_batch=0; it must be at least 1."),
        (iter([1]), 1, "it needs len() and [i]"),
    ],
)
def test_what_cannot_feed_a_step_is_refused(data: Any, batch: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Loader(Feed(data, batch, 0, 1))
    assert words in str(caught.value)
