"""Stores at a URL: a real S3 server (moto) over a socket, and a cache that all processes of a host share."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from shoal.data import Store, flow
from shoal.data.feed import Feed
from shoal.data.flow import _
from shoal.data.loader import Loader
from shoal.data.store.build import BuildOptions
from shoal.data.store.places.open_place import open_place
from shoal.data.store.places.pages import Cache
from shoal.data.store.places.remote_place import RemotePlace
from shoal.data.store.upkeep import collect, copy_store
from shoal.errors import ConfigError
from tests.unit.test_remote import s3, server

__all__ = ["s3", "server"]  # fixtures
SMALL = BuildOptions(file_bytes=2**18)


def table(rows: int) -> pa.Table:
    draw = np.random.default_rng(rows)
    return pa.table(
        {
            "id": np.arange(rows),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(draw.standard_normal(rows * 16)), 16),
            "tokens": [list(range(i % 7)) for i in range(rows)],
            "name": [f"row {i}" for i in range(rows)],
        }
    )


@pytest.fixture
def url(s3: Any) -> str:
    assert s3 is not None
    return "s3://copies/store"


def check(store: Store, made: pa.Table, ids: np.ndarray[Any, Any]) -> None:
    found = store.batch(ids)
    rows = made.take(pa.array(ids)).to_pylist()
    assert found["id"].tolist() == [row["id"] for row in rows]
    assert found["x"].tolist() == [row["x"] for row in rows]
    assert found["name"] == [row["name"] for row in rows]
    assert [row[row >= 0].tolist() for row in found["tokens"]] == [row["tokens"] for row in rows]


def test_rows_come_in_blocks_into_a_shared_cache(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = table(20_000)
    for module in (
        "places.pages",
        "manifest",
        "build",
        "verify",
    ):  # nobody wants to wait for blocks of 4 MiB to fill up
        monkeypatch.setattr(f"shoal.data.store.{module}.BLOCK", 2**16)
    local = Store.write(tmp_path / "local", made, options=BuildOptions(file_bytes=2**21))
    small = f"{url}-blocks"
    copy_store(open_place(tmp_path / "local"), open_place(small))
    asked: list[int] = []
    fetch = RemotePlace.fetch

    def counted(self: RemotePlace, file: Any, start: int, stop: int) -> bytes:
        asked.append(stop - start)
        return fetch(self, file, start, stop)

    monkeypatch.setattr(RemotePlace, "fetch", counted)
    cache = tmp_path / "cache"
    store = Store(small, cache=cache, pad={"tokens": -1})
    check(store, made, np.array([5, 19_000]))
    assert 0 < sum(asked) < store.manifest.nbytes / 2
    ids = np.random.default_rng(0).integers(0, 20_000, 500)
    check(store, made, ids)
    before = sum(asked)
    again = Store(small, cache=cache, pad={"tokens": -1})
    check(again, made, ids)
    assert sum(asked) == before  # what is here is not fetched again
    flags = next(cache.rglob("*.blocks"))
    data = flags.with_suffix("")
    bad = data.read_bytes()
    data.write_bytes(bytes([bad[0] ^ 1]) + bad[1:])
    check(Store(small, cache=cache, pad={"tokens": -1}), made, ids)  # found, and fetched again
    assert sum(asked) > before
    first = Loader(Feed(Store(small, cache=cache, columns=("id",)), 64, 0, 1, workers=1)).take(3).batches[0]
    assert torch.equal(
        first[0], Loader(Feed(Store(local.url, columns=("id",)), 64, 0, 1)).take(3).batches[0][0]
    )


def test_a_damaged_block_is_named(url: str, tmp_path: Path) -> None:
    store = Store.write(url, table(500))
    place = open_place(url)
    assert isinstance(place, RemotePlace)
    name = f"data/{store.manifest.files[0].name}"
    text = place._files.cat_file(place._at(name))
    place._files.pipe_file(place._at(name), text[:100] + bytes([text[100] ^ 1]) + text[101:])
    with pytest.raises(ConfigError, match=rf"{name} is damaged in bytes 0 to \d+; restore it"):
        _ = Store(url, cache=tmp_path)[0]
    assert store.verify() == [f"{store.manifest.files[0].name} is damaged in bytes 0 to {len(text)}"]
    place.remove(name)
    with pytest.raises(ConfigError, match=r"is missing, and the manifest"):
        _ = Store(url, cache=tmp_path / "other")[0]


def test_the_cache_keeps_to_its_limit(url: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    urls = [f"{url}-{number}" for number in range(3)]
    for one in urls:
        Store.write(one, table(2000))
    size = Store(urls[0]).manifest.nbytes
    with pytest.raises(ConfigError, match=r"may hold 0\.0 GB; give Store\(…, cache_limit=…\) more"):
        _ = Store(urls[0], cache=cache, cache_limit=size - 1)[0]
    for one in urls[:2]:
        child = os.fork()
        if child == 0:
            Store(one, cache=cache).record_batches()
            os._exit(0)
        os.waitpid(child, 0)
    assert len(list(cache.glob("*/lock"))) == 2
    limit = int(size * 2.5)
    store = Store(urls[2], cache=cache, cache_limit=limit)
    store.record_batches()
    assert len(list(cache.glob("*/lock"))) == 2  # the one that was unused longest went
    used = sum(path.stat().st_blocks * 512 for path in cache.rglob("*"))
    assert used <= limit
    with pytest.raises(ConfigError, match="may hold"):
        Cache(cache, 10).hold("s3://other", 11)
    Cache(cache, limit).hold("s3://other", limit)
    assert store[7]["name"] == "row 7"  # what is in use stays


def test_a_flow_reads_and_writes_there(url: str, tmp_path: Path) -> None:
    place = open_place(url)
    assert isinstance(place, RemotePlace)
    from pyarrow import parquet

    for number in range(2):
        parquet.write_table(table(100).slice(number * 50, 50), tmp_path / "part.parquet")
        place._files.put_file(str(tmp_path / "part.parquet"), place._at("in", f"{number}.parquet"))
    with flow.session() as data:
        rows = data.read(f"{url}/in/*.parquet").filter(_.id % 2 == 0)
        store = rows.write(f"{url}/out", options=SMALL)
        assert store.tensor("id").tolist() == list(range(0, 100, 2))
        assert [fact["bytes"] > 0 for fact in store.manifest.lineage[0]["inputs"]] == [True, True]
        with pytest.raises(ConfigError, match=r"nothing is at s3://.*/none/\*"):
            data.read(f"{url}/none/*.parquet")


def test_an_upload_that_is_killed_counts_for_nothing(url: str, tmp_path: Path, everything: bool) -> None:
    made = table(3000)
    local = Store.write(tmp_path / "local", made, options=BuildOptions(file_bytes=2**16))
    draw = random.Random(0)
    for number in range(20 if everything else 3):
        there = f"{url}-{number}"
        child = os.fork()
        if child == 0:
            copy_store(open_place(tmp_path / "local"), open_place(there, tmp_path))
            os._exit(0)
        time.sleep(draw.uniform(0.05, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        target = open_place(there, tmp_path)
        if target.versions():
            assert Store(there, cache=tmp_path).verify() == []
        copy_store(open_place(tmp_path / "local"), target)
        store = Store(there, cache=tmp_path / "cache")
        assert store.manifest == local.manifest
        assert store[2999]["name"] == "row 2999"
        shutil.rmtree(tmp_path / "cache")


def test_what_nobody_needs_goes(url: str) -> None:
    first = Store.write(url, table(100))
    Store.write(url, table(200), options=BuildOptions(replace=True))
    assert collect(open_place(url), dry=True) == ([], {})
    old, gone = collect(open_place(url), keep=1)
    assert (old, list(gone)) == ([1], [first.manifest.files[0].name])
    assert len(Store(url)) == 200
    with pytest.raises(ConfigError, match="has no version 1; there are 2"):
        Store(url, version=1)
    with pytest.raises(ConfigError, match="there is a store at s3://"):
        Store.write(url, table(100))


def test_what_cannot_be_reached_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        Store("nosuch://bucket/store")
