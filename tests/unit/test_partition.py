"""Partitions: every sample to exactly one part, as large as its weight says, and the same everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.columns import keys_for
from shoal.errors import ConfigError
from shoal.partition import make_partition
from shoal.partition.cuts import sizes, split, stretches
from shoal.partition.hashes import hash_keys
from shoal.partition.skew import skew

WEIGHTS = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=9).map(np.array)


@given(count=st.integers(0, 400), parts=st.integers(1, 40), share=st.sampled_from([1.0, 0.1, 1 / 3, 7.0]))
def test_equal_weights_cut_as_ever(count: int, parts: int, share: float) -> None:
    """The cuts decide which samples share a dropout mask: they must not move."""
    wanted = [split(count, parts, index) for index in range(parts)]
    assert stretches(count, np.full(parts, share)) == wanted
    cuts = make_partition("block").cuts(count, np.full(parts, share))
    assert cuts == wanted


@given(count=st.integers(0, 3000), weights=WEIGHTS)
def test_sizes_follow_weights(count: int, weights: np.ndarray) -> None:
    found = np.array(sizes(count, weights))
    assert found.sum() == count
    assert (np.abs(found - count * weights / weights.sum()) < 1).all()


def divided(text: str, ids: np.ndarray, weights: Any, seed: int = 0, keys: Any = None) -> list[list[int]]:
    keys = ids if keys is None else np.asarray(keys)
    return [
        part.tolist() for part in make_partition(text).divide(ids, keys, np.asarray(weights, float), seed)
    ]


def test_block_and_sequential() -> None:
    ids = np.array([5, 1, 9, 3, 7])
    assert divided("block", ids, [1, 1]) == [[5, 1, 9], [3, 7]]
    assert divided("sequential", ids, [1, 1]) == [[1, 3, 5], [7, 9]]
    assert divided("block", ids, [3, 1, 1]) == [[5, 1, 9], [3], [7]]


@given(count=st.integers(0, 60), parts=st.integers(1, 9))
def test_round_robin_deals_like_cards(count: int, parts: int) -> None:
    ids = np.arange(count)
    assert divided("roundrobin", ids, np.ones(parts)) == [ids[part::parts].tolist() for part in range(parts)]


def test_round_robin_spreads_turns() -> None:
    assert divided("roundrobin", np.arange(12), [2, 1]) == [[0, 2, 3, 5, 6, 8, 9, 11], [1, 4, 7, 10]]


def test_random_is_drawn_anew_and_keeps_the_order() -> None:
    ids = np.random.default_rng(0).permutation(1000)
    one, other = divided("random", ids, [1, 1], seed=1), divided("random", ids, [1, 1], seed=2)
    assert one == divided("random", ids, [1, 1], seed=1)
    both = len(set(one[0]) & set(other[0]))
    assert 200 < both < 300, "two draws of a half share a quarter"
    place = {sample: at for at, sample in enumerate(ids.tolist())}
    assert all(sorted(part, key=place.__getitem__) == part for part in one)


@pytest.mark.parametrize("text", ["hash(id)", "consistent(id)", "consistent(id, kind=ring)"])
def test_hashes_follow_weights(text: str) -> None:
    found = divided(text, np.arange(50_000), [3, 1, 1, 2])
    share = np.array([len(part) for part in found]) / 50_000
    assert np.abs(share - np.array([3, 1, 1, 2]) / 7).max() < 0.02


@pytest.mark.parametrize("text", ["hash", "feature(id)", "consistent", "consistent(id, kind=ring)"])
@given(keys=st.lists(st.sampled_from(["ann", "bob", "eve", "", "ü"]), max_size=60), weights=WEIGHTS)
@settings(max_examples=30, deadline=None)
def test_equal_keys_meet(text: str, keys: list[str], weights: np.ndarray) -> None:
    parts = divided(text, np.arange(len(keys)), weights, keys=np.array(keys, dtype=object))
    homes: dict[str, set[int]] = {}
    for number, part in enumerate(parts):
        for sample in part:
            homes.setdefault(keys[sample], set()).add(number)
    assert all(len(home) == 1 for home in homes.values())


def test_a_key_keeps_its_part_whoever_else_is_there() -> None:
    ids = np.arange(500)
    for text in ("hash", "consistent", "consistent(id, kind=ring)"):
        whole = divided(text, ids, np.ones(5))
        for start in range(0, 500, 100):
            some = divided(text, ids[start : start + 100], np.ones(5))
            assert [set(part) for part in some] == [
                {i for i in part if start <= i < start + 100} for part in whole
            ]


def test_feature_is_balanced() -> None:
    keys = [0] * 6 + [1] * 3 + [2] * 3 + [3] * 2 + [4] * 2
    assert sorted(len(part) for part in divided("feature(x)", np.arange(16), [1, 1], keys=keys)) == [8, 8]
    heavy = divided("feature(x)", np.arange(16), [3, 1], keys=keys)
    assert [len(part) for part in heavy] == [13, 3]


def test_bucket_sorts_by_length() -> None:
    keys = [5, 1, 4, 1, 3]
    assert divided("bucket(n)", np.array([10, 11, 12, 13, 14]), [1, 1], keys=keys) == [[11, 13, 14], [12, 10]]


@pytest.mark.parametrize("kind", ["rendezvous", "ring"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_new_part_moves_only_what_it_takes(kind: str, weighted: bool) -> None:
    keys = np.random.default_rng(3).integers(-(2**62), 2**62, 40_000)
    partition = make_partition(f"consistent(id, kind={kind})")

    def weights(parts: int) -> np.ndarray:
        return np.array([2.0, 1.0] * 9)[:parts] if weighted else np.ones(parts)

    def owners(parts: int) -> np.ndarray:
        found = np.empty(len(keys), dtype=int)
        for number, part in enumerate(partition.divide(np.arange(len(keys)), keys, weights(parts), 0)):
            found[part] = number
        return found

    before = owners(1)
    for parts in range(1, 17):
        after = owners(parts + 1)
        moved = after != before
        assert (after[moved] == parts).all(), "keys move to the new part only"
        share = weights(parts + 1)[-1] / weights(parts + 1).sum()
        assert share - 0.02 <= moved.mean() <= share + 0.02
        before = after


def test_plain_hashing_would_move_nearly_everything() -> None:
    """What `consistent` is for, and the check that the test above could fail."""
    ids = np.arange(20_000)
    four, five = (divided("hash", ids, np.ones(n)) for n in (4, 5))
    stayed = sum(len(set(a) & set(b)) for a, b in zip(four, five, strict=False))
    assert stayed / 20_000 < 0.6


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (np.array([0, 1, -1]), [16294208416658607535, 10451216379200822465, 16490336266968443936]),
        (np.array([True]), [10451216379200822465]),
        (np.array([1.5, -0.0]), [15481881892811333770, 16294208416658607535]),
        (np.array(["ann", "ü"], dtype=object), [5200682613324210888, 6748675957732712302]),
        (np.array([b"ann"], dtype=object), [5200682613324210888]),
    ],
)
def test_hashes_never_change_between_versions(keys: np.ndarray, expected: list[int]) -> None:
    assert hash_keys(keys).tolist() == expected


def test_hashes_of_all_kinds_of_numbers() -> None:
    for kind in (np.int8, np.int32, np.uint8, np.int64):
        assert hash_keys(np.array([3, 100], kind)).tolist() == hash_keys(np.array([3, 100])).tolist()
    assert hash_keys(np.array([0.0])).tolist() == hash_keys(np.array([-0.0])).tolist()
    assert hash_keys(np.array([np.nan])).tolist() == hash_keys(-np.array([np.nan])).tolist()
    assert hash_keys(np.array(["ann"])).tolist() == hash_keys(np.array(["ann"], dtype=object)).tolist()


def test_skew() -> None:
    assert skew([[4, 4], [4, 4]], np.array([1.0, 1.0])) == 1.0
    assert skew([[6, 2], [4, 4]], np.array([1.0, 1.0])) == 1.25
    assert skew([[6, 2]], np.array([3.0, 1.0])) == 1.0
    assert skew([[0, 8]], np.array([3.0, 1.0])) == 4.0
    assert skew([[0, 0]], np.array([1.0, 1.0])) == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blok", "unknown partition 'blok'; did you mean 'block'?"),
        ("block(shares=2/0)", "shares=2/0: give each worker a number from 1e-6 to 1e6, joined by '/'"),
        ("block(shares=2/-1)", "shares=2/-1: give each worker a number from 1e-6 to 1e6"),
        ("block(shares=a/b)", "shares=a/b: give each worker"),
        ("block(shares=nan)", "shares=nan: give each worker"),
        ("block(shares=1/inf)", "shares=1/inf: give each worker"),
        ("block(share=1/2)", "block has no option 'share'; did you mean 'shares'?"),
        ("bucket(n, window=0)", "window=0 should be a number of global batches from 1 to 1048576"),
        ("bucket(n, window=many)", "window=many should be int"),
        ("consistent(id, kind=circle)", "kind=circle; it is rendezvous or ring."),
        ("feature", "feature needs column, as in 'feature(column=...)'"),
        ("hash(a, b, c)", "takes at most 2 (key, shares)"),
        ("hash(", "expected a name or a value"),
    ],
)
def test_wrong_texts(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_partition(text)
    assert words in str(caught.value)


def test_shares_become_weights() -> None:
    assert make_partition("block(2/1)").weights(6).tolist() == [2, 2, 2, 1, 1, 1]
    assert make_partition("hash(id, shares=3)").weights(2).tolist() == [3, 3]
    with pytest.raises(ConfigError, match="shares=2/1 are for 2 workers, and a step is cut into 3 parts"):
        make_partition("block(2/1)").weights(3)
    even = {
        text: make_partition(text).even for text in ("block", "block(2/2)", "block(2/1)", "hash", "bucket")
    }
    assert even == {"block": True, "block(2/2)": True, "block(2/1)": False, "hash": False, "bucket": True}


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        ("hash(user)", {}, "asks for column 'user', which columns= does not have. There are: id."),
        ("hash(usr)", {"user": [1, 2, 3]}, "did you mean 'user'? There are: id, user."),
        ("hash(user)", {"user": [1, 2]}, "column 'user' has shape [2] and the data set 3 samples"),
        ("hash(user)", {"user": torch.zeros(3, 2)}, "column 'user' has shape [3, 2]"),
        ("hash(user)", {"user": 5}, "column 'user' has shape [1]"),
        ("hash(user)", {"user": [1, [2], 3]}, "column 'user' holds int, list; give numbers only"),
        ("hash(user)", {"user": ["a", None, "b"]}, "column 'user' holds NoneType, str; give numbers only"),
        ("hash(user)", {"user": [{}, {}, {}]}, "column 'user' holds dict"),
        ("bucket(n)", {"n": ["a", "b", "c"]}, "column 'n' holds text, and the partition sorts by numbers"),
        ("block", {"id": [1, 2, 3]}, "columns= has 'id', which means the number of the sample"),
    ],
)
def test_wrong_columns(text: str, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_for(make_partition(text), columns, 3)
    assert words in str(caught.value)


def test_columns_of_all_kinds() -> None:
    hashed = make_partition("hash(k)")
    given_as = [
        [4, 5, 4],
        (4, 5, 4),
        np.array([4, 5, 4]),
        torch.tensor([4, 5, 4]),
        range(3),
        [True, False, True],
    ]
    for values in given_as:
        keys = keys_for(hashed, {"k": values}, 3)
        assert keys is not None
        assert keys.shape == (3,)
    assert keys_for(make_partition("hash"), {"k": [1]}, 3) is None
    for values in (["a", "b", "a"], np.array(["a", "b", "a"]), [b"a", b"b", b"a"]):
        keys = keys_for(hashed, {"k": values}, 3)
        assert keys is not None
        first, second, third = hash_keys(keys).tolist()
        assert first == third != second
