"""The global order: a permutation, the same however it is cut, and one that looks uniformly random."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.order import GlobalOrder
from shoal.errors import ConfigError
from shoal.partition.cuts import split

SEEDS = st.integers(-(2**70), 2**70)


def whole(num_samples: int, seed: int, epoch: int = 0) -> np.ndarray:
    return GlobalOrder(num_samples, seed).ids(epoch, 0, num_samples)


def excess(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square in standard deviations above what chance gives."""
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@settings(max_examples=150, deadline=None)
@given(num_samples=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_every_sample_comes_exactly_once(num_samples: int, seed: int, epoch: int) -> None:
    ids = whole(num_samples, seed, epoch)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1_000_003, 2**20, 2**20 + 1, 2**20 - 1])
def test_every_sample_comes_exactly_once_at_a_million(num_samples: int) -> None:
    counts = np.bincount(whole(num_samples, seed=3), minlength=num_samples)
    assert counts.size == num_samples
    assert (counts == 1).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_samples=st.integers(1, 100_000), seed=SEEDS)
def test_the_order_does_not_depend_on_how_it_is_cut(data: st.DataObject, num_samples: int, seed: int) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, num_samples), max_size=8)))
    order = GlobalOrder(num_samples, seed)
    bounds = [0, *cuts, num_samples]
    pieces = [order.ids(1, start, stop) for start, stop in pairwise(bounds)]
    assert np.array_equal(np.concatenate(pieces), order.ids(1, 0, num_samples))


@pytest.mark.parametrize("num_samples", [10**9, 10**12, 2**62])
def test_a_huge_order_is_reached_anywhere(num_samples: int) -> None:
    order = GlobalOrder(num_samples, seed=5)
    for start in (0, num_samples // 2, num_samples - 100_000):
        ids = order.ids(0, start, start + 100_000)
        assert len(np.unique(ids)) == 100_000
        assert ids.min() >= 0
        assert ids.max() < num_samples
        assert np.array_equal(ids[70_000:70_010], order.ids(0, start + 70_000, start + 70_010))


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    assert GlobalOrder(100, seed=1, shuffle=False).ids(7, 10, 20).tolist() == list(range(10, 20))


@pytest.mark.parametrize(
    ("num_samples", "seed", "epoch", "start", "expected"),
    [
        (10, 0, 0, 0, [0, 4, 6, 3]),
        (5, 1, 4, 0, [3, 4, 1, 0]),
        (1025, 3, 1, 1021, [477, 949, 988, 87]),
        (1_000_003, 7, 2, 1000, [830711, 684, 42174, 285269]),
        (10**9, 0, 0, 5 * 10**8, [569229625, 45521494, 774213923, 327315831]),
        (10**12, 1, 0, 0, [134722503871, 672794180179, 108440614274, 490257781163]),
        (
            2**62,
            0,
            0,
            2**61,
            [273800244080210038, 3672144221378807571, 1782732848180833723, 2386270595026928312],
        ),
    ],
)
def test_the_order_never_changes_between_versions(
    num_samples: int, seed: int, epoch: int, start: int, expected: list[int]
) -> None:
    assert GlobalOrder(num_samples, seed).ids(epoch, start, start + 4).tolist() == expected


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_a_tiny_data_set_takes_every_order_equally_often(num_samples: int) -> None:
    orders = math.factorial(num_samples)
    trials = 60 * orders
    seen = Counter(
        tuple(whole(num_samples, seed, epoch)) for seed in range(6) for epoch in range(trials // 6)
    )
    assert len(seen) == orders
    assert excess(np.array(list(seen.values())), np.full(orders, trials / orders)) < 4


def test_ten_samples_take_a_new_order_each_epoch() -> None:
    assert len({tuple(whole(10, 0, epoch)) for epoch in range(500)}) > 495


@pytest.mark.parametrize("num_samples", [1000, 1025, 2048, 3001, 10**9])
def test_neighbouring_positions_hold_independent_uniform_samples(num_samples: int) -> None:
    trials, bins = 4000, 12
    place = num_samples // 3
    pairs = np.array([GlobalOrder(num_samples, n // 8).ids(n % 8, place, place + 2) for n in range(trials)])
    edges = (np.arange(bins + 1) * num_samples + bins - 1) // bins
    share = np.diff(edges) / num_samples
    binned = pairs * bins // num_samples
    assert excess(np.bincount(binned[:, 0], minlength=bins), trials * share) < 4
    joint = np.bincount(binned[:, 0] * bins + binned[:, 1], minlength=bins**2)
    assert excess(joint, trials * np.outer(share, share).ravel()) < 4
    ends = np.bincount((pairs[:, 0] % 8) * 8 + pairs[:, 1] % 8, minlength=64)
    assert excess(ends, np.full(64, trials / 64)) < 4


@pytest.mark.parametrize("num_samples", [1025, 5000, 2**17 + 1])
def test_an_order_has_no_serial_correlation(num_samples: int) -> None:
    orders = [whole(num_samples, seed) for seed in range(30)]
    for lag in (1, 2, 64):
        found = [np.corrcoef(ids[:-lag], ids[lag:])[0, 1] * math.sqrt(num_samples) for ids in orders]
        assert abs(np.mean(found)) < 4 / math.sqrt(len(orders))
        assert np.std(found) < 1.6


@pytest.mark.parametrize("num_samples", [1000, 1025, 2**17 + 1])
def test_epochs_and_seeds_are_unrelated(num_samples: int) -> None:
    epochs = [whole(num_samples, 0, epoch) for epoch in range(30)]
    seeds = [whole(num_samples, seed, 0) for seed in range(1, 31)]
    both = epochs + seeds + [np.arange(num_samples)]
    agreeing = [np.count_nonzero(a == b) for n, a in enumerate(both) for b in both[:n]]
    # Two unrelated permutations agree in one position on average, with variance one.
    assert abs(np.mean(agreeing) - 1) < 4 / math.sqrt(len(agreeing))
    correlated = [abs(np.corrcoef(a, b)[0, 1]) for n, a in enumerate(both) for b in both[:n]]
    assert max(correlated) * math.sqrt(num_samples) < 5


@given(count=st.integers(0, 10**12), parts=st.integers(1, 300))
def test_split_covers_everything_with_nearly_equal_shares(count: int, parts: int) -> None:
    shares = [split(count, parts, index) for index in range(parts)]
    assert shares[0][0] == 0
    assert shares[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1


def test_what_cannot_work_is_refused_in_a_sentence() -> None:
    order = GlobalOrder(10, seed=0)
    for call, sentence in [
        (lambda: GlobalOrder(0, seed=0), "between 1 and 2\\*\\*62 samples; this data set has 0"),
        (lambda: GlobalOrder(2**62 + 1, seed=0), "between 1 and 2\\*\\*62 samples"),
        (lambda: order.ids(-1, 0, 1), "no epoch -1"),
        (lambda: order.ids(0, -1, 1), "positions \\[-1, 1\\)"),
        (lambda: order.ids(0, 5, 4), "positions \\[5, 4\\)"),
        (lambda: order.ids(0, 0, 11), "an epoch of 10 samples"),
        (lambda: split(-1, 2, 0), "cannot split -1 items"),
        (lambda: split(5, 2, 2), "part 2 of 2 does not exist"),
        (lambda: split(5, 0, 0), "part 0 of 0 does not exist"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            call()


def test_an_empty_range_is_empty() -> None:
    assert GlobalOrder(10**9, seed=0).ids(0, 10**9, 10**9).size == 0
    assert GlobalOrder(10, seed=0).ids(0, 3, 3).size == 0
