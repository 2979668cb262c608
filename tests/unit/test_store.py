"""The store: what went in comes out, whatever was killed, flipped or appended meanwhile."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import shoal
from shoal.data import KeyIndex, PackedTokens, Store
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.data.store.build import BuildOptions, build
from shoal.data.store.manifest import StoreManifest, version_name
from shoal.data.store.places.place import LocalPlace
from shoal.errors import ConfigError
from shoal.partition import make_partition

SMALL = BuildOptions(file_bytes=4096)
"""Many files of few rows."""


def table(rows: int, seed: int = 0) -> pa.Table:
    """A column of each kind, with nulls where they may be."""
    draw = np.random.default_rng(seed)
    pyrandom = random.Random(seed)
    tokens = [draw.integers(0, 100, int(n)).astype(np.int32) for n in draw.integers(0, 9, rows)]
    flags = draw.random(rows) < 0.5
    return pa.table(
        {
            "id": np.arange(rows),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(draw.standard_normal(rows * 6, dtype="f4")), 6),
            "tokens": pa.array(tokens, pa.list_(pa.int32())),
            "text": [f"row {i} é" * pyrandom.randrange(3) for i in range(rows)],
            "image": [bytes([i % 256]) * (i % 5) for i in range(rows)],
            "flag": pa.array(flags),
            "half": pa.array(draw.standard_normal(rows).astype("f2")),
            "gap": pa.array([None if i % 7 == 3 else i / 2 for i in range(rows)], pa.float64()),
        }
    )


def same(value: Any, wanted: Any) -> bool:
    if isinstance(value, torch.Tensor):
        wanted = torch.tensor(float("nan") if wanted is None else wanted, dtype=value.dtype)
        return value.shape == wanted.shape and bool(torch.equal(value.nan_to_num(-1), wanted.nan_to_num(-1)))
    return bool(value == wanted)


@pytest.mark.parametrize("options", [BuildOptions(), SMALL], ids=["one file", "many files"])
def test_what_went_in_comes_out(options: BuildOptions, tmp_path: Path) -> None:
    made = table(500)
    store = Store.write(tmp_path, made, options=options, lineage={"flow": "test"})
    assert len(store) == 500
    assert (len(store.manifest.files) > 10) == (options is SMALL)
    ids = np.random.default_rng(1).integers(0, 500, 64)
    rows = made.take(pa.array(ids)).to_pylist()
    for sample, row in zip(store.__getitems__(ids.tolist()), rows, strict=True):
        assert all(same(sample[name], row[name]) for name in row), row["id"]
    plain = Store(tmp_path, pad={"tokens": -1})
    batch = plain.batch(ids)
    for number, row in enumerate(rows):
        padded = row.pop("tokens")
        assert batch["tokens"][number].tolist()[: len(padded)] == padded
        assert set(batch["tokens"][number].tolist()[len(padded) :]) <= {-1}
        assert all(same(batch[name][number], value) for name, value in row.items())
    assert same(store[-1]["id"], 499)
    assert torch.equal(store.tensor("id"), torch.arange(500))
    assert store.verify() == []
    assert pa.Table.from_batches(store.record_batches()).equals(made)


def test_equal_rows_make_equal_bytes(tmp_path: Path) -> None:
    """However the rows came in batches; with rubbish behind nulls too."""
    made = table(300)
    first = Store.write(tmp_path / "a", made, options=SMALL)
    parts = [made.slice(a, 37).combine_chunks().to_batches()[0] for a in range(0, 300, 37)]
    second = Store.write(tmp_path / "b", parts, options=SMALL)
    gap = made.column("gap").combine_chunks()
    rubbish = np.where(gap.is_null().to_numpy(zero_copy_only=False), 7.0, gap.fill_null(0).to_numpy())
    dirty = pa.Array.from_buffers(gap.type, 300, [gap.buffers()[0], pa.py_buffer(rubbish)])
    third = Store.write(tmp_path / "c", made.set_column(7, "gap", dirty), options=SMALL)
    names = [[file.name for file in store.manifest.files] for store in (first, second, third)]
    assert names[0] == names[1] == names[2]


def test_a_batch_of_the_loader_is_gathered(tmp_path: Path) -> None:
    Store.write(tmp_path, table(200), options=SMALL)
    store = Store(tmp_path, columns=("x", "id"))
    one, two = (
        [Loader(Feed(store, 20, rank, size, seed=3)).take(4).batches[0] for rank in range(size)]
        for size in (1, 2)
    )
    assert torch.equal(torch.cat([part[1] for part in two]), one[0][1])
    assert torch.equal(one[0][0], store.tensor("x")[one[0][1]])
    ahead = Loader(Feed(store, 20, 0, 1, seed=3, workers=1))
    assert torch.equal(ahead.take(4).batches[0][1], one[0][1])
    assert Store.__reduce__(store)[1][1]["version"] == 1
    assert torch.equal(pickle.loads(pickle.dumps(store))[5][0], store[5][0])


def test_a_partition_reads_columns_of_the_store(tmp_path: Path) -> None:
    made = table(300)
    store = Store.write(tmp_path, made, options=SMALL)
    for text, name in (
        ("bucket(tokens, window=4)", "tokens"),
        ("hash(text)", "text"),
        ("feature(flag)", "flag"),
    ):
        given = made.column(name).to_pylist()
        columns = {name: [len(value) for value in given] if name == "tokens" else given}
        plain = Loader(Feed(range(300), 30, 0, 2, partition=make_partition(text), columns=columns))
        own = Loader(Feed(Store(tmp_path, columns=("id",)), 30, 0, 2, partition=make_partition(text)))
        for step in range(3):
            wanted = plain.take(step).batches[0]
            assert torch.equal(own.take(step).batches[0][0], wanted), text
    with pytest.raises(ConfigError, match="did you mean 'tokens'"):
        Loader(Feed(store, 30, 0, 2, partition=make_partition("bucket(token)")))


def test_a_store_that_grows_is_read_exactly_once(tmp_path: Path) -> None:
    Store.write(tmp_path, table(100), options=SMALL)
    feed = Feed(Store(tmp_path, columns=("id",)), 8, 0, 1, seed=5)
    before = Loader(feed)
    used = [i for step in range(4) for i in before.take(step).batches[0][0].tolist()]
    state = before.cursor(4).to_state()
    more = table(30, seed=1)
    more = more.set_column(0, "id", pa.array(np.arange(100, 130)))
    build(LocalPlace(tmp_path), more.schema, lambda _: more.to_batches(), {"n": 2}, BuildOptions(append=True))
    grown = Store(tmp_path, columns=("id",))
    assert (len(grown), grown.version) == (130, 2)
    after = Loader(Feed(grown, 8, 0, 1, seed=5))
    assert any("grown from 100 to 130 samples" in line for line in after.go_on(4, state))
    end = after.steps_until(1)
    assert end == 13
    rest = [i for step in range(4, end) for i in after.take(step).batches[0][0].tolist()]
    assert sorted(used + rest) == list(range(100))
    second = [i for step in range(end, after.steps_until(2)) for i in after.take(step).batches[0][0].tolist()]
    assert sorted(second) == list(range(130))
    again = Loader(Feed(grown, 8, 0, 1, seed=5))  # and a run that ends before that epoch does
    again.go_on(6, after.cursor(6).to_state())
    assert [again.take(s).batches[0][0].tolist() for s in (6, 20)] == [
        after.take(s).batches[0][0].tolist() for s in (6, 20)
    ]
    new = Store(tmp_path, since=1, columns=("id",))
    assert new.batch(np.arange(30))[0].tolist() == list(range(100, 130))
    assert len(Store(tmp_path, version=1)) == 100
    wrong = more.drop_columns(["flag"])
    with pytest.raises(ConfigError, match="column 'flag' is missing in the new rows and bool in the store"):
        build(LocalPlace(tmp_path), wrong.schema, lambda _: wrong.to_batches(), {}, BuildOptions(append=True))
    with pytest.raises(ConfigError, match="there is a store at"):
        Store.write(tmp_path, more)


def test_packing_keeps_every_token_and_boundary(tmp_path: Path) -> None:
    made = table(400)
    store = Store.write(tmp_path, made, options=SMALL)
    lists = [row for row in made.column("tokens").to_pylist() if row]
    for whole in (False, True):
        packed = PackedTokens(store, "tokens", length=16, whole=whole)
        batch = packed.batch(np.arange(len(packed)))
        tokens, segments, positions = (batch[name].numpy() for name in ("tokens", "segments", "positions"))
        kept = segments >= 0
        assert tokens[kept].tolist() == [token for row in lists for token in row]
        assert positions[kept].tolist() == [place for row in lists for place in range(len(row))]
        found = 0
        for row in range(len(packed)):
            starts = np.flatnonzero((positions[row] == 0) & kept[row])
            found += len(starts)
            inside = segments[row][kept[row]]
            assert inside[0] == 0
            assert set(np.diff(inside).tolist()) <= {0, 1}
            if whole:
                assert positions[row][0] == 0
                assert len(starts) == inside[-1] + 1
            else:
                assert kept[row].all() or row == len(packed) - 1
        assert found == len(lists)
    with pytest.raises(ConfigError, match="wants each in one sample of 4"):
        PackedTokens(store, "tokens", length=4, whole=True)


def test_rows_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest row of a key counts; a damaged index, or keys whose hashes meet, never give another's row."""
    made = pa.table({"name": [f"n{i % 300}" for i in range(1000)], "number": np.arange(1000) * 7})
    store = Store.write(tmp_path, made, options=SMALL)
    names = [*(f"n{i}" for i in range(310)), ""]
    wanted = [900 + i if i < 100 else 600 + i if i < 300 else -1 for i in range(310)] + [-1]
    assert KeyIndex(store, "name").rows(names).tolist() == wanted
    assert KeyIndex(store, "number").rows([14, 15, 6993]).tolist() == [2, -1, 999]
    index = next(tmp_path.glob("index-00001-*.npy"))
    for number, path in enumerate(sorted(tmp_path.glob("index-*.npy"))):
        text = bytearray(path.read_bytes())
        text[200 + number :: 97] = bytes(len(text[200 + number :: 97]))
        path.write_bytes(text)
    found = KeyIndex(store, "name").rows(names)
    for row, right, name in zip(found.tolist(), wanted, names, strict=True):
        assert row in (-1, right) or made["name"][row].as_py() == name
    index.write_bytes(b"short")
    for path in tmp_path.glob("index-*.npy"):
        path.unlink()
    lengths = "shoal.data.store.keys.hash_keys"
    monkeypatch.setattr(lengths, lambda keys: np.array([len(str(key)) for key in keys], np.uint64))
    assert KeyIndex(store, "name").rows(names).tolist() == wanted  # all hashes meet
    with pytest.raises(ConfigError, match=r"1 of 2 keys are not in column 'name', such as 'eve'"):
        KeyIndex(store, "name").batch(["n1", "eve"])


def test_a_flipped_bit_is_found(tmp_path: Path, everything: bool) -> None:
    store = Store.write(tmp_path, table(3000), options=BuildOptions(file_bytes=2**16))
    draw = random.Random(0)
    tries = 10_000 if everything else 300
    for _ in range(tries):
        file = draw.choice(store.manifest.files)
        path = store._place.local(file)
        place, bit = draw.randrange(file.bytes), 1 << draw.randrange(8)
        with open(path, "r+b") as out:
            out.seek(place)
            old = out.read(1)[0]
            out.seek(place)
            out.write(bytes([old ^ bit]))
        found = store.verify()
        with open(path, "r+b") as out:
            out.seek(place)
            out.write(bytes([old]))
        assert len(found) == 1
        assert file.name in found[0]
    assert store.verify() == []


def test_a_manifest_is_not_believed(tmp_path: Path) -> None:
    Store.write(tmp_path, table(10))
    path = tmp_path / version_name(1)
    text = path.read_bytes()
    for place in range(0, len(text), 7):
        path.write_bytes(text[:place] + bytes([text[place] ^ 4]) + text[place + 1 :])
        with pytest.raises(ConfigError, match=r"v00001\.json cannot be used"):
            Store(tmp_path)
    path.write_bytes(text)
    manifest = StoreManifest.loads(text)
    file = tmp_path / "data" / manifest.files[0].name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="its manifest says"):
        _ = Store(tmp_path)[0]
    file.unlink()
    with pytest.raises(ConfigError, match="is missing, and the manifest"):
        _ = Store(tmp_path)[0]


def slowly(batches: list[Any], first: int) -> Iterable[Any]:
    for batch in batches:
        if first < batch.num_rows:
            time.sleep(0.001)
            yield batch.slice(first)
        first = max(first - batch.num_rows, 0)


def test_a_build_that_is_killed_counts_for_nothing_and_goes_on(tmp_path: Path, everything: bool) -> None:
    """Killed at any moment: no version, or the whole one; and the next build writes what is missing."""
    made = table(3000)
    batches = made.combine_chunks().to_batches(max_chunksize=50)
    wanted = [file.name for file in Store.write(tmp_path / "wanted", made, options=SMALL).manifest.files]
    draw = random.Random(0)
    kills = 50 if everything else 6
    resumed = 0
    for number in range(kills):
        place = LocalPlace(tmp_path / f"store-{number}")
        while True:
            child = os.fork()
            if child == 0:
                build(place, made.schema, lambda first: slowly(batches, first), {"flow": "slow"}, SMALL)
                os._exit(0)
            time.sleep(draw.uniform(0.01, 0.12))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            resumed += any((stage / "journal").exists() for stage in place.stages())
            if os.waitstatus_to_exitcode(status) == 0 or place.versions():
                break
            if draw.random() < 0.5:
                build(place, made.schema, lambda first: slowly(batches, first), {"flow": "slow"}, SMALL)
                break
        store = Store(place.folder)
        assert [file.name for file in store.manifest.files] == wanted
        assert store.verify() == []
    assert resumed > kills // 4


def test_who_builds_the_same_waits_and_finds_it(tmp_path: Path) -> None:
    """As all workers of a job do; and a second start."""
    made = table(1000)
    batches = made.combine_chunks().to_batches(max_chunksize=50)
    place = LocalPlace(tmp_path / "store")

    def noted(first: int, number: int) -> Iterable[Any]:
        (tmp_path / f"built-by-{number}").touch()
        return slowly(batches, first)

    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            found = build(place, made.schema, partial(noted, number=number), {"flow": "same"}, SMALL)
            os._exit(0 if found.rows == 1000 else 1)
        children.append(child)

    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    again = build(place, made.schema, lambda first: noted(first, 9), {"flow": "same"}, SMALL)
    assert again.version == 1
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert not place.stages()
    with pytest.raises(ConfigError, match="there is a store at"):
        build(place, made.schema, lambda first: noted(first, 9), {"flow": "other"}, SMALL)


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has type struct<a: int64>, and a store holds"):
        Store.write(tmp_path, pa.table({"s": [{"a": 1}]}))
    with pytest.raises(ConfigError, match="there are no rows to write"):
        Store.write(tmp_path, pa.table({"a": pa.array([], pa.int64())}))
    with pytest.raises(ConfigError, match="lists with 1 nulls in them"):
        Store.write(tmp_path, pa.table({"a": [[1, None]]}))
    with pytest.raises(ConfigError, match="has a row of 1 numbers, and shapes= says 2 each"):
        Store.write(tmp_path, pa.table({"a": [[1, 2], [1]]}), options=BuildOptions(shapes={"a": (2,)}))
    assert list(tmp_path.iterdir()) == []
    store = Store.write(tmp_path, pa.table({"a": [1, None], "b": [[1], [2, 3]]}))
    with pytest.raises(ConfigError, match="column 'a' has 1 nulls"):
        store.batch(np.arange(2))
    with pytest.raises(ConfigError, match="has rows of unequal length"):
        Store(tmp_path, columns=("b",)).batch(np.arange(2))
    with pytest.raises(ConfigError, match="no column 'aa'; did you mean 'a'"):
        Store(tmp_path, columns=("aa",))
    with pytest.raises(IndexError, match="sample 2 of 2"):
        _ = store[2]
    assert Store(tmp_path, fill={"a": 9}, columns=("a",)).batch(np.arange(2))[0].tolist() == [1, 9]
    with pytest.raises(ConfigError, match="there is no store at"):
        Store(tmp_path / "nowhere")


def test_without_pyarrow_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Store.write(tmp_path, table(10))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"need pyarrow, .* run pip install 'shoal\[data\]'"):
        _ = Store(tmp_path)[0]


def test_first_rows_of_an_embedding_come_from_a_store(tmp_path: Path) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype="f4")), 3)
    store = Store.write(tmp_path, pa.table({"item": [7, 3, 7, 0], "vector": vectors, "name": list("abcd")}))
    index = KeyIndex(store, "item")
    (piece,) = index.first_rows("vector")()
    assert piece[0].tolist() == [3, 7, 0]  # of the two rows of 7 the last counts
    assert piece[1].tolist() == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]

    def run(rows: int) -> shoal.Run:
        return shoal.Run(
            model=lambda: torch.nn.Sequential(
                shoal.SparseEmbedding(rows, 3, initial=index.first_rows("vector")), torch.nn.Linear(3, 1)
            ),
            loss=lambda output, batch: (output.sum(), len(batch)),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            data=list(torch.arange(4)),  # type: ignore[arg-type]
            inputs=lambda batch: batch,
            global_batch=2,
            strategy="solo",
            log=None,
            progress=False,
        )

    rows = run(8).module[0](torch.tensor([7, 0, 3]))  # type: ignore[index]
    assert rows.tolist() == [[6, 7, 8], [9, 10, 11], [3, 4, 5]]
    with pytest.raises(ConfigError, match="for ids from 0 to 7; the table has rows 0 to 6 of 3 numbers"):
        run(7)
    with pytest.raises(ConfigError, match="first rows need whole numbers as keys"):
        index.first_rows("name")
    with pytest.raises(ConfigError, match="gives up rows"):
        shoal.SparseEmbedding(8, 3, capacity=2, initial=index.first_rows("vector"))


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64"])
def test_unsigned_numbers_are_read_as_they_are(kind: str, tmp_path: Path) -> None:
    high = int(np.iinfo(kind).max)
    made = getattr(pa, kind)()
    pair = pa.FixedSizeListArray.from_arrays(pa.array([high, 1] * 3, made), 2)
    lists = pa.array([[high], [1, 2], []], pa.list_(made))
    table = pa.table({"x": pa.array([1, high, None], made), "pair": pair, "list": lists})
    Store.write(tmp_path, table, options=SMALL)
    store = Store(tmp_path, fill={"x": 7}, pad={"list": 0})
    for ids in (np.array([2, 0, 1]), np.arange(3)):
        batch = store.batch(ids)
        assert batch["x"].tolist() == [[1, high, 7][i] for i in ids]
        assert batch["pair"].tolist() == [[high, 1]] * 3
        assert batch["list"].tolist() == [[[high, 0], [1, 2], [0, 0]][i] for i in ids]
        assert str(batch["x"].dtype) == f"torch.{kind}"
