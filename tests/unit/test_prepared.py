"""Stores that are prepared part by part: every sample once, whoever makes what and in whichever order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import PreparedStore, Store
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.data.order import BlockOrder, make_order
from shoal.data.prepared import parts
from shoal.data.prepared.parts import Division, Parts
from shoal.data.store.build import BuildOptions
from shoal.data.store.places.open_place import open_place
from shoal.data.store.upkeep import collect
from shoal.errors import ConfigError

pytest.importorskip("pyarrow", reason="stores need pyarrow")
made: list[int] = []


def prepare(part: int) -> dict[str, Any]:
    made.append(part)
    return {"x": np.arange(part * 8, min(part * 8 + 8, 30))}


def opened(folder: Path, ahead: int = 2) -> PreparedStore:
    made.clear()
    return PreparedStore(folder, prepare, rows=8, samples=30, ahead=ahead, columns=("x",))


def ids(loader: Loader, steps: range) -> list[list[int]]:
    found = []
    for step in steps:
        (batch,) = loader.take(step).batches
        assert batch is not None
        found.append(batch[0].tolist())
    return found


def test_the_first_epoch_takes_part_after_part_and_all_are_exact(tmp_path: Path) -> None:
    data = opened(tmp_path / "store")
    loader = Loader(Feed(data, 5, 0, 1, seed=3))
    first = ids(loader, range(2))
    assert made == [0, 1]  # nothing is made before it is needed: nobody else works here
    first += ids(loader, range(2, 6))
    flat = [x for step in first for x in step]
    assert sorted(flat) == list(range(30))
    assert [x // 8 for x in flat] == sorted(x // 8 for x in flat)
    assert flat != sorted(flat)
    second = [x for step in ids(loader, range(6, 12)) for x in step]
    assert sorted(second) == list(range(30))
    assert [x // 8 for x in second] != sorted(x // 8 for x in second)
    assert made == [0, 1, 2, 3]

    again = Loader(
        Feed(opened(tmp_path / "store"), 5, 0, 1, seed=3)
    )  # a resume in the middle of the first epoch
    assert again.go_on(3, loader.cursor(3).to_state()) == []
    assert ids(again, range(3, 9)) == [*first[3:], second[:5], second[5:10], second[10:15]]
    assert made == []
    plain = Loader(Feed(Store(tmp_path / "store", columns=("x",)), 5, 0, 1, seed=3))
    (said,) = plain.go_on(3, loader.cursor(3).to_state())
    assert said == "shuffle was parts(8) and is True: epoch 0 goes on in another order"
    assert plain.go_on(7, loader.cursor(7).to_state()) == []


def test_those_who_prepare_stay_near_and_nobody_collects_under_them(tmp_path: Path) -> None:
    data = opened(tmp_path / "store")
    others = Parts(tmp_path / "store", prepare, Division(8, 30, ahead=1), BuildOptions())
    looks = iter(range(20))
    others.make_ahead(lambda: next(looks, None) is None)
    assert made == [0, 1]  # training has asked for nothing yet
    assert data[0] is not None
    looks = iter(range(20))
    others.make_ahead(lambda: next(looks, None) is None)
    assert made == [0, 1]
    with pytest.raises(ConfigError, match="being built by another process"):
        collect(open_place(tmp_path / "store"))
    assert data[17][0].item() == 17
    assert made == [0, 1, 2]
    looks = iter(range(20))
    others.make_ahead(lambda: next(looks, None) is None)
    assert made == [0, 1, 2, 3]
    assert not (tmp_path / "store" / ".build-parts").exists()
    assert (len(Store(tmp_path / "store")), Store(tmp_path / "store").verify()) == (30, [])


def test_parts_may_be_made_in_any_order_twice_and_by_the_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PATIENCE_SECONDS", 0.2)
    division = Division(8, 30)
    one, other = (Parts(tmp_path, prepare, division, BuildOptions()) for _ in range(2))
    for part in (3, 1, 1):
        one.make(part)
    assert one.committed() == 0
    with other._claim(0) as mine:  # another process, which does not move
        assert mine
        one.need(1)
    assert one.committed() == other.committed() == 2
    child = os.fork()
    if child == 0:
        with one._claim(2):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    other.need(3)
    other.make(3)  # once more, when all is done
    store = Store(tmp_path)
    assert [row["x"].item() for row in store] == list(range(30))
    assert (store.version, store.verify()) == (4, [])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda _: {"x": np.arange(7)}, "gave 7 rows, and part 0 has 8"),
        (lambda _: 1 / 0, r"prepare\(0\) raised ZeroDivisionError"),
        (lambda _: [1, 2], "gave list; it gives an Arrow table"),
        (lambda _: {"x": [{}] * 8}, "has type struct"),
        (lambda part: {"x" if part == 0 else "y": np.arange(8)}, "column 'x' is missing"),
    ],
)
def test_what_a_part_cannot_be_is_a_sentence(
    tmp_path: Path, function: Callable[[int], Any], words: str
) -> None:
    data = PreparedStore(tmp_path / "store", function, rows=8, samples=16)
    with pytest.raises(ConfigError, match=words):
        data.batch(np.arange(16))


def test_another_function_is_refused(tmp_path: Path) -> None:
    assert len(opened(tmp_path).batch(np.arange(4))) == 1
    with pytest.raises(ConfigError, match="was made by another function"):
        PreparedStore(tmp_path, prepare, rows=4, samples=30)
    with pytest.raises(ConfigError, match="prepared in a folder"):
        PreparedStore("s3://bucket/x", prepare, rows=4, samples=30)


@pytest.mark.parametrize(("count", "rows", "window"), [(1000, 32, 3), (997, 10, 4), (5, 8, 2), (64, 1, 1)])
def test_blocks_are_a_permutation_of_near_neighbours(count: int, rows: int, window: int) -> None:
    order = BlockOrder(count, 5, rows, window)
    epochs = [order.ids(epoch, 0, count) for epoch in range(3)]
    for epoch, found in enumerate(epochs):
        assert sorted(found.tolist()) == list(range(count))
        pieces = [order.ids(epoch, at, min(at + 7, count)) for at in range(0, count, 7)]
        assert np.concatenate(pieces).tolist() == found.tolist()
        for start in range(0, count, rows * window):  # so many places are read at a time
            some = np.sort(found[start : start + rows * window])
            assert (np.diff(some) > 1).sum() <= window + 1
    if count > 100:
        assert epochs[0].tolist() != epochs[1].tolist() != epochs[2].tolist()


def test_what_shuffle_may_be() -> None:
    assert make_order(10, 0, "blocks(4)") == BlockOrder(10, 0, 4, 16)
    for text, words in [
        ("blocks(0)", "at least one row"),
        ("blocks", "needs rows"),
        ("", "it is True, False"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make_order(10, 0, text)
    loader = Loader(Feed(list(range(50)), 5, 0, 1, shuffle="blocks(4, window=2)"))
    later = Loader(Feed(list(range(50)), 5, 0, 1, shuffle="blocks(8, window=2)"))
    (said,) = later.go_on(2, loader.cursor(2).to_state())
    assert said.startswith("shuffle was blocks(4, window=2) and is blocks(8, window=2): epoch 0 goes on")
