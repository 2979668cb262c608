"""Going on in the middle of an epoch: any number of restarts, any number of workers, any batch size, no sample lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shoal.data.cursor import Cursor, Track
from shoal.data.feed import Feed
from shoal.data.grouped import GroupedOrder
from shoal.data.loader import Loader
from shoal.data.order import GlobalOrder
from shoal.data.stream import StreamLoader, make_loader
from shoal.errors import ConfigError
from shoal.partition import make_partition

PARTITIONS = ("block", "hash(key)", "bucket(key, window=3)", "bucket(key, window=1)", "random", "consistent")


class Count:
    """A stream of numbers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.samples):
            self.read += 1
            yield number


def feeds(data: Any, batch: int, size: int, accumulate: int, text: str, seed: int = 3) -> list[Feed]:
    streams = isinstance(data, Count)
    columns = {} if streams else {"key": [(13 * i) % 29 for i in range(len(data))]}
    partition = make_partition(text)
    return [
        Feed(data, batch, rank, size, accumulate, seed, partition=partition, columns=columns)
        for rank in range(size)
    ]


def samples_of(loaders: list[Any], step: int) -> tuple[int, list[int]]:
    """The epoch of a step and the samples that all workers have of it."""
    portions = [loader.take(step) for loader in loaders]
    batches = [batch for portion in portions for batch in portion.batches if batch is not None]
    ids = [i for batch in batches for i in batch.tolist()]
    assert all(portion.samples == len(ids) for portion in portions)
    assert len({portion.epoch for portion in portions}) == 1
    return portions[0].epoch, ids


Era = tuple[int, int, int, int]
"""Workers, micro-batches of each, samples per step, and steps until the next restart."""
ERAS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.integers(0, 9)),
    min_size=1,
    max_size=7,
)


def run_eras(data: Any, eras: list[Era], text: str) -> dict[int, list[int]]:
    """Every sample that a run with restarts uses, by epoch; the last era ends with an epoch."""
    used: dict[int, list[int]] = {}
    state: dict[str, Any] | None = None
    step = 0
    for number, (size, accumulate, batch, steps) in enumerate(eras):
        loaders = [make_loader(feed) for feed in feeds(data, batch, size, accumulate, text)]
        if state is not None:
            for loader in loaders:
                loader.go_on(step, json.loads(json.dumps(state)))
        last = number == len(eras) - 1
        done = 0
        while done < steps or (last and loaders[0].cursor(step).position > 0):
            epoch, ids = samples_of(loaders, step)
            used.setdefault(epoch, []).extend(ids)
            step, done = step + 1, done + 1
        state = loaders[-1].cursor(step).to_state()
    return used


@pytest.mark.parametrize("text", PARTITIONS)
@settings(max_examples=60, deadline=None)
@given(count=st.integers(12, 60), eras=ERAS)
def test_each_sample_once_an_epoch_through_any_restarts(text: str, count: int, eras: list[Era]) -> None:
    for epoch, ids in run_eras(range(count), eras, text).items():
        assert Counter(ids) == Counter(range(count)), f"epoch {epoch}"


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 60), eras=ERAS)
def test_streams_too(count: int, eras: list[Era]) -> None:
    for epoch, ids in run_eras(Count(count), eras, "hash").items():
        assert sorted(ids) == list(range(count)), f"epoch {epoch}"


@pytest.mark.parametrize("text", PARTITIONS)
@settings(max_examples=30, deadline=None)
@given(count=st.integers(12, 60), batch=st.integers(1, 12), eras=ERAS)
def test_the_same_global_batches_at_the_same_steps(
    text: str, count: int, batch: int, eras: list[Era]
) -> None:
    data = range(count)
    plain = [Loader(feed) for feed in feeds(data, batch, 1, 1, text)]
    state, step = None, 0
    for size, accumulate, _, steps in eras:
        loaders = [Loader(feed) for feed in feeds(data, batch, size, accumulate, text)]
        if state is not None:
            assert [loader.go_on(step, state) for loader in loaders] == [[]] * size
        for _ in range(steps):
            (epoch, ids), (wanted_epoch, wanted) = samples_of(loaders, step), samples_of(plain, step)
            assert (epoch, sorted(ids)) == (wanted_epoch, sorted(wanted))
            step += 1
        state = loaders[0].cursor(step).to_state()
        assert state == plain[0].cursor(step).to_state()


@settings(max_examples=100, deadline=None)
@given(
    samples=st.integers(1, 99),
    batch=st.integers(1, 40),
    step=st.integers(0, 50),
    epoch=st.integers(0, 4),
    share=st.floats(0, 0.99),
    epochs=st.integers(0, 7),
)
def test_steps_until(samples: int, batch: int, step: int, epoch: int, share: float, epochs: int) -> None:
    """The formula beside counting."""
    position = int(share * samples)
    track = Track(samples, batch, step, epoch, position)
    counted = step
    while (place := track.span(counted))[0] < epochs:
        assert place[1] < place[2] <= samples
        counted += 1
    plain = track.step == 0 and track.epoch == 0 and track.position == 0  # then it knows what was before too
    assert track.until(epochs) == (counted if epochs > epoch or not plain else epochs * track.per_epoch)


def test_parts_of_epochs() -> None:
    assert [Track(100, 10).until(epochs) for epochs in (0.5, 1.25, 2, 0)] == [5, 12, 20, 0]
    half = Track(100, 25, step=5, epoch=0, position=50)
    assert [half.until(epochs) for epochs in (0.4, 0.5, 0.75, 1, 1.5)] == [5, 5, 6, 7, 9]


def test_a_loader_knows_when_epochs_end() -> None:
    loader = Loader(Feed(range(10), 4, 0, 1))
    assert loader.steps_until(2) == 6
    assert [loader.ended(step, 2) for step in (5, 6, 7)] == [False, True, True]
    loader.go_on(3, {**loader.cursor(2).to_state(), "batch": 2})
    assert loader.steps_until(2) == 7, "one step for the last two samples, then an epoch of three"
    with pytest.raises(ConfigError, match="step 3 lies before step 4, with which this run goes on"):
        loader.take(2)


class Slow(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("text", ["block", "bucket(key, window=2)", "hash(key)"])
def test_the_state_does_not_see_what_was_prepared_ahead(text: str) -> None:
    here = Loader(feeds(Slow(), 5, 2, 2, text)[0])
    ahead = Loader(replace(here.feed, workers=2))
    for step in range(4):
        first, second = here.take(step).batches, ahead.take(step).batches
        assert str(first) == str(second)
        assert ahead.cursor(step + 1) == here.cursor(step + 1), "whatever the processes have begun with"
    state = ahead.cursor(4).to_state()
    again = Loader(replace(here.feed, workers=2, global_batch=3))
    told = again.go_on(4, state)
    assert told == ["global_batch was 5 and is 3: epoch 0 goes on from sample 20 in batches of the new size"]
    other = Loader(replace(here.feed, global_batch=3))
    other.go_on(4, state)
    assert [str(again.take(step).batches) for step in range(4, 14)] == [
        str(other.take(step).batches) for step in range(4, 14)
    ]
    ahead.take(4)
    ahead.go_on(5, state)
    here.go_on(5, state)
    assert str(ahead.take(5).batches) == str(here.take(5).batches), (
        "what was prepared for another place is dropped"
    )


def test_the_state_is_small() -> None:
    largest = Cursor(2**53, 2**62 - 1, 2**62, -(2**63), 2**40, 2**40, 2**20, False)
    text = json.dumps(largest.to_state(), separators=(",", ":"))
    assert len(text) <= 200
    assert Cursor.from_state(json.loads(text)) == largest
    huge = Loader(Feed(range(10), 4, 0, 1, seed=-(2**900))).cursor(2)
    assert len(json.dumps(huge.to_state())) <= 200
    again = Loader(Feed(range(10), 4, 0, 1, seed=-(2**900)))
    assert again.go_on(2, huge.to_state()) == []
    assert again.go_on(2, {**huge.to_state(), "seed": 5}) != []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": 2**54}, "epoch is"),
        ({"position": "3"}, "position is '3'"),
        ({"position": 3.0}, "position is 3.0"),
        ({"position": True}, "position is True"),
        ({"position": 10}, "position is 10 of 10 samples"),
        ({"samples": None}, "samples is None"),
        ({"batch": 0}, "batch 0"),
        ({"window": 3}, "window 3, grain 0"),
        ({"shuffle": 1}, "shuffle is 1"),
        ({"seed": "x"}, "seed is 'x'"),
    ],
)
def test_damaged_states(changes: dict[str, Any], words: str) -> None:
    loader = Loader(Feed(range(10), 4, 0, 1))
    with pytest.raises(ConfigError) as caught:
        loader.go_on(1, {**loader.cursor(1).to_state(), **changes})
    assert "the place in the data is damaged: " in str(caught.value)
    assert words in str(caught.value)
    for nothing in ([], None, {}):
        with pytest.raises(ConfigError, match="damaged"):
            loader.go_on(1, nothing)  # type: ignore[arg-type]


def test_what_has_changed_is_said() -> None:
    state = Loader(Feed(range(20), 4, 0, 1)).cursor(3).to_state()
    other = Loader(Feed(range(10), 4, 0, 1, seed=1, shuffle=False))
    assert other.go_on(3, state) == [
        "samples was 20 and is 10: epoch 0 goes on in another order",
        "seed was 0 and is 1: epoch 0 goes on in another order",
        "shuffle was True and is False: epoch 0 goes on in another order",
    ]
    assert other.take(3).epoch == 1, "position 12 of 10 samples is the end of the epoch"
    larger = Loader(Feed(range(30), 4, 0, 1))
    larger.go_on(3, state)
    assert larger.cursor(3).position == 12


def test_an_epoch_ends_in_the_order_in_which_it_began() -> None:
    def feed(text: str, batch: int) -> Feed:
        return feeds(range(40), batch, 1, 1, text)[0]

    sorted_ = Loader(feed("bucket(key, window=2)", 4))
    begun = [i for step in range(3) for i in sorted_.take(step).batches[0].tolist()]
    state = sorted_.cursor(3).to_state()
    for text, batch in (("bucket(key, window=2)", 5), ("bucket(key, window=5)", 4)):
        other = Loader(feed(text, batch))
        other.go_on(3, state)
        rest = [
            i for step in range(3, other.steps_until(1) or 0) for i in other.take(step).batches[0].tolist()
        ]
        assert sorted(begun + rest) == list(range(40)), text
        fresh = Loader(feed(text, batch))
        first = other.steps_until(1)
        assert first is not None
        assert other.take(first).batches[0].tolist() == fresh.take(fresh.steps_per_epoch).batches[0].tolist()
    plain = Loader(feed("block", 4))
    assert plain.go_on(3, state) == [
        "epoch 0 was sorted by length and the partition does not sort now: some of its samples come twice and others "
        "not at all"
    ]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 3000),
    grain=st.integers(1, 40),
    window=st.integers(1, 9),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_sorted_windows_are_a_permutation(
    count: int, grain: int, window: int, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 100, count)
    base = GlobalOrder(count, seed, shuffle)
    whole = GroupedOrder(base, lengths, grain, window).ids(2, 0, count)
    assert np.array_equal(np.sort(whole), np.arange(count))
    a, b = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    assert np.array_equal(GroupedOrder(base, lengths, grain, window).ids(2, a, b), whole[a:b])
    span = grain * window
    for start in range(0, count, span):
        stop = min(start + span, count)
        assert set(whole[start:stop]) == set(base.ids(2, start, stop)), "samples stay in their window"
        spreads = [np.ptp(lengths[whole[at : min(at + grain, stop)]]) for at in range(start, stop, grain)]
        batches = -(-(stop - start) // grain)
        assert sum(spreads) <= 99 + batches, "the batches of a window hardly overlap in length"


def test_batches_of_a_window_come_in_random_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 64 * 256)
    order = GroupedOrder(GlobalOrder(len(lengths), 0), lengths, 256, 64)
    means = lengths[order.ids(0, 0, len(lengths))].reshape(64, 256).mean(1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3
    other = lengths[order.ids(1, 0, len(lengths))].reshape(64, 256).mean(1)
    assert abs(np.corrcoef(means, other)[0, 1]) < 0.4, "and in another one in each epoch"


def padding(lengths: np.ndarray, text: str, batch: int, size: int, accumulate: int) -> float:
    """The share of padding in all micro-batches of an epoch."""
    partition = make_partition(text)
    feed = Feed(lengths, batch, 0, 1, size * accumulate, partition=partition, columns={"length": lengths})
    loader = Loader(replace(feed, collate=lambda rows: np.array(rows)))
    real = padded = 0
    for step in range(loader.steps_per_epoch):
        for rows in loader.take(step).batches:
            if rows is not None:
                real, padded = real + rows.sum(), padded + rows.max() * len(rows)
    return 1 - real / padded


@pytest.mark.parametrize("size", [1, 8])
def test_buckets_need_little_padding(size: int) -> None:
    drawn = np.random.default_rng(0).lognormal(4.9, 0.8, 40_000)
    lengths = np.clip(drawn, 8, 1024).astype(int)
    assert padding(lengths, "block", 256, size, 8 // size) > 0.25
    assert padding(lengths, "bucket(length)", 256, size, 8 // size) < 0.05


def test_buckets_never_pad_more_than_chance() -> None:
    """Hostile lengths: all alike, two kinds, few samples, a handful of giants."""
    cases = [np.full(500, 7), np.array([1, 1000] * 250), np.arange(1, 40), np.array([1] * 490 + [9999] * 10)]
    for lengths in cases:
        for batch in (8, 39):
            assert (
                padding(lengths, "bucket(length)", batch, 2, 2)
                <= padding(lengths, "block", batch, 2, 2) + 1e-9
            )


class Torch(IterableDataset[int]):
    """A stream of torch's own kind, which shuffles itself by epoch and draws."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        for number in np.random.default_rng(self.epoch).permutation(10).tolist():
            yield number, torch.rand(1).item()


def test_streams_of_torch() -> None:
    feed = Feed(Torch(), 4, 0, 1, 2)
    whole = [str(make_loader(feed).take(step).batches) for step in range(7)]
    assert len(set(whole)) == 7, "each epoch has an order of its own"
    for begin in range(6):
        state = make_loader(feed).cursor(begin).to_state()
        again = make_loader(feed)
        assert again.go_on(begin, state) == []
        assert [str(again.take(step).batches) for step in range(begin, 7)] == whole[begin:], "draws included"
    ranks = [make_loader(Feed(Torch(), 4, rank, 2, 1)) for rank in range(2)]
    for step in range(7):
        parts = [batch for loader in ranks for batch in loader.take(step).batches]
        assert str(tuple(parts)) == whole[step], "two workers have what one has"


def test_streams_jump_and_end() -> None:
    loader = StreamLoader(Feed(Count(10), 4, 0, 1))
    assert loader.steps_until(1) is None
    assert loader.steps_per_epoch is None
    assert [loader.ended(step, 1) for step in range(5)] == [False, False, False, True, True]
    assert [loader.take(step).batches[0].tolist() for step in (4, 0, 2)] == [
        [4, 5, 6, 7],
        [0, 1, 2, 3],
        [8, 9],
    ]
    assert StreamLoader(Feed(Count(8), 4, 0, 1)).ended(2, 1), (
        "an epoch that ends with a full batch is over then"
    )
    source = Count(10)
    loader = StreamLoader(Feed(source, 4, 0, 1))
    loader.take(0)
    loader.take(2)
    assert source.read == 10, "the next epoch is not begun before it is asked for"
    with pytest.raises(ConfigError, match=r"0\.5 epochs of a stream: its length is not known"):
        loader.ended(1, 0.5)
    loader.go_on(7, loader.cursor(1).to_state())
    assert loader.take(7).batches[0].tolist() == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match="step 7 lies before step 8"):
        loader.take(6)


def test_fillers_of_streams() -> None:
    feed = Feed(Count(5), 4, 1, 2, fill=True)
    portion = StreamLoader(feed).take(1)
    assert (portion.batches[0].tolist(), portion.counts, portion.samples) == ([4], (False,), 1)
    assert StreamLoader(replace(feed, fill=False)).take(1).batches == (None,)


class Once:
    """A stream that can be read only once."""

    def __init__(self) -> None:
        self.rest = iter(range(4))

    def __iter__(self) -> Iterator[int]:
        return self.rest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": Count(0)}, "the stream ended after 0 samples of epoch 0, and sample 0 is the next"),
        ({"workers": 2}, "loader_workers=2 with a stream"),
        ({"columns": {"key": [1]}}, "a stream has no columns to divide by 'id'"),
        ({"partition": make_partition("hash(key)")}, "a stream has no columns to divide by 'key'"),
        ({"partition": make_partition("bucket(id)")}, "a stream has no columns"),
        ({"data": Once()}, "the stream ended after 0 samples of epoch 1"),
        ({"global_batch": 0}, "global_batch=0; it must be at least 1."),
    ],
)
def test_wrong_streams(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loader(replace(Feed(Count(3), 2, 0, 1), **changes)).take(3)
    assert words in str(caught.value)


def test_a_stream_that_became_shorter() -> None:
    state = StreamLoader(Feed(Count(20), 4, 0, 1)).cursor(3).to_state()
    loader = StreamLoader(Feed(Count(10), 4, 0, 1))
    loader.go_on(3, state)
    with pytest.raises(ConfigError, match="ended after 10 samples of epoch 0, and sample 12 is the next"):
        loader.take(3)


@pytest.mark.parametrize("text", PARTITIONS)
def test_skew_is_measured(text: str) -> None:
    loader = Loader(feeds(range(60), 12, 2, 2, text)[1])
    found = loader.skew(3)
    assert found is not None
    assert found[1] == 3
    assert found[0] >= 1
    assert (found[0] == 1) == loader.feed.partition.even
