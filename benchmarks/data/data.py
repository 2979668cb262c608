"""Stores and flows beside what else reads and makes data.

    scripts/bench data

Random gathers of 256 rows by number, from one file and from 100, beside a bare memory-mapped Arrow batch and parquet
row groups; the loader's samples a second; reading in sequence beside read(); and a flow of 10 million rows beside the
same SQL written by hand for DuckDB. Contestants alternate; figures are ratios of medians of CPU time.

Goals: 0.8 of a bare Arrow batch from one file, 0.5 from 100; 100 times parquet row groups; 200,000 small samples a
second from two loaders; 0.9 of read() in sequence; 1.1 times hand-written SQL.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.result import Column, Goal, Section
from benchmarks.workload.turns import forth_and_back
from shoal.data import Store, flow
from shoal.data.feed import Feed
from shoal.data.flow import _
from shoal.data.loader import Loader
from shoal.data.store.build import BuildOptions

BATCH = 256
NUMBERS = ("id", "label", "x")


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much data."""
    parser.add_argument("--rows", type=int, default=400_000, help="of the store; 330 bytes each")
    parser.add_argument("--flow-rows", type=int, default=10_000_000, help="of the flow")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One section a subject."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    try:
        yield _gathers(folder, options.rows)
        yield _loading(folder)
        yield _flows(folder, options.flow_rows)
    finally:
        shutil.rmtree(folder)


def _table(rows: int) -> Any:
    import pyarrow as pa

    draw = np.random.default_rng(0)
    x = pa.FixedSizeListArray.from_arrays(pa.array(draw.standard_normal(rows * 64, dtype="f4")), 64)
    text = [f"sample {i} " * (1 + i % 5) for i in range(rows)]
    return pa.table(
        {"id": np.arange(rows), "label": draw.integers(0, 10, rows).astype("i4"), "x": x, "text": text}
    )


def in_turns(makers: Mapping[str, Callable[[], object]], turns: int, times: int) -> dict[str, float]:
    """Median seconds of CPU of each contestant, for one call."""
    seen: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(turns + 1):
        for name in forth_and_back(list(makers), turn):
            began = time.process_time()
            for _number in range(times):
                makers[name]()
            seen[name].append((time.process_time() - began) / times)
    return {name: statistics.median(found[1:]) for name, found in seen.items()}


def _gathers(folder: Path, rows: int) -> Section:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.ipc as ipc
    import pyarrow.parquet as pq

    table = _table(rows)
    one = Store.write(folder / "one", table, options=BuildOptions(file_bytes=2**31))
    many = Store.write(folder / "many", table, options=BuildOptions(file_bytes=one.manifest.nbytes // 100))
    pq.write_table(table, folder / "groups.parquet", row_group_size=1000)
    groups = pq.ParquetFile(folder / "groups.parquet", memory_map=True)
    path = folder / "one" / "data" / one.manifest.files[0].name
    bare = ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    numbers = bare.select(list(NUMBERS))
    draw = np.random.default_rng(1)

    def ids() -> Any:
        return draw.integers(0, rows, BATCH)

    def row_groups() -> Any:
        wanted = np.sort(ids())
        which = wanted // 1000
        parts = [
            groups.read_row_group(int(n), columns=list(NUMBERS)).take(pa.array(wanted[which == n] - n * 1000))
            for n in np.unique(which)
        ]
        return pa.concat_tables(parts)

    stores = {name: Store(folder / name, columns=NUMBERS) for name in ("one", "many")}
    fast = {
        "bare Arrow batch, take": lambda: numbers.take(pa.array(ids())),
        "store of one file": lambda: stores["one"].batch(ids()),
        f"store of {len(many.manifest.files)} files": lambda: stores["many"].batch(ids()),
        "bare, with text as Python objects": lambda: bare.take(pa.array(ids())).column("text").to_pylist(),
        "store, with text as Python objects": lambda: one.batch(ids()),
    }
    times = in_turns(fast, turns=15, times=100)
    times |= in_turns({"parquet, row groups of 1000": row_groups}, turns=3, times=1)
    del pc
    base = times["bare Arrow batch, take"]
    names = list(times)
    goals = [
        Goal("speed / bare Arrow, one file", base / times[names[1]], 0.8, least=True),
        Goal("speed / bare Arrow, many files", base / times[names[2]], 0.5, least=True),
        Goal("speed / parquet row groups", times[names[-1]] / times[names[1]], 100, least=True),
    ]
    cells = [[name, BATCH / seconds, seconds, base / seconds] for name, seconds in times.items()]
    columns = [Column("256 rows at random"), Column("rows/s", "{:,.0f}"), Column("a gather", "seconds")]
    return Section("random rows", [*columns, Column("speed / bare Arrow", "{:.2f} ×")], cells, goals)


def _loading(folder: Path) -> Section:
    store = Store(folder / "one", columns=("id", "label"))
    loaders = [Loader(Feed(store, 2 * 512, rank, 2)) for rank in range(2)]
    steps = min(200, loaders[0].steps_per_epoch)
    began = time.perf_counter()
    for step in range(steps):
        for loader in loaders:
            loader.take(step)
    speed = steps * 1024 / (time.perf_counter() - began)
    path = folder / "one" / "data" / store.manifest.files[0].name
    whole = Store(folder / "one", columns=("x",))

    def read() -> int:
        with open(path, "rb") as file:
            return sum(len(block) for block in iter(lambda: file.read(2**20), b""))

    def through_store() -> None:
        for start in range(0, len(whole), 4096):
            whole.batch(np.arange(start, min(start + 4096, len(whole))))

    times = in_turns({"read()": read, "store": through_store}, turns=7, times=1)
    share = len(whole) * 256 / path.stat().st_size
    ratio = times["read()"] * share / times["store"]
    goals = [
        Goal("small samples a second, two loaders on one core", speed, 200_000, least=True),
        Goal("bytes in sequence / read()", ratio, 0.9, least=True),
    ]
    rows = [["two loaders, samples/s", speed], ["in sequence, bytes/s of read()'s", ratio]]
    return Section("feeding", [Column("what"), Column("figure", "{:,.2f}")], rows, goals)


def _flows(folder: Path, rows: int) -> Section:
    import duckdb

    path = folder / "events.parquet"
    duckdb.sql(
        f"copy (select i as id, i * 7919 % 1000003 as user, i % 5 as kind, (i * 31 % 997) / 997.0 as value "
        f"from range({rows}) t(i)) to '{path}'"
    )
    by_hand = (
        f"select kind, user % 100 as bucket, count(*) as n, avg(value) as mean, max(value * 2 + 1) as high "
        f"from '{path}' where kind <> 3 group by all order by all"
    )

    def hand() -> Any:
        with duckdb.connect() as connection:
            return connection.execute(by_hand).to_arrow_table()

    def written() -> Any:
        with flow.session() as data:
            events = data.read(path).filter(_.kind != 3).map({"bucket": _.user % 100, "v2": _.value * 2 + 1})
            values = {"n": _.count(), "mean": _.value.mean(), "high": _.v2.max()}
            return events.group(("kind", "bucket"), values).order("kind", "bucket").arrow()

    assert written().num_rows == hand().num_rows == 400
    times = in_turns({"SQL by hand": hand, "flow": written}, turns=5, times=1)
    ratio = times["flow"] / times["SQL by hand"]
    cells = [[name, rows, seconds, seconds / times["SQL by hand"]] for name, seconds in times.items()]
    columns = [
        Column("10 M rows on DuckDB"),
        Column("rows", "{:,}"),
        Column("CPU", "seconds"),
        Column("time / by hand", "{:.2f} ×"),
    ]
    note = "A flow also makes a checksum of its input, for the lineage."
    return Section("a flow", columns, cells, [Goal("CPU / SQL by hand", ratio, 1.1)], [note])
