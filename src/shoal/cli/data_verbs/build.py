"""`shoal data build` and `shoal data sql`: from files to a store, or to a table on the screen."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.text_columns import columns, size_text
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.data.flow.flow import Flow
    from shoal.data.flow.sessions import Session

Engine = Annotated[str, typer.Option(help="duckdb, spark, local[2] or spark://host:7077.")]
Memory = Annotated[str | None, typer.Option(help="A limit, as 2GB; beyond it the engine spills.")]
Threads = Annotated[int | None, typer.Option(help="Of DuckDB; 1 repeats itself bit for bit.")]


def build(
    source: Annotated[
        str,
        typer.Argument(help="Files, a folder, a URL; or a script with `build(data)`.", show_default=False),
    ],
    store: Annotated[
        str, typer.Argument(help="Where the store goes: a folder or a URL.", show_default=False)
    ],
    engine: Engine = "duckdb",
    memory: Memory = None,
    threads: Threads = None,
    kind: Annotated[str | None, typer.Option(help="Of the files: parquet, csv or json.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="A column of lists of one length, as image=3x32x32.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="Sort rows by these columns, with commas.")] = None,
    append: Annotated[bool, typer.Option("--append", help="A new version with these rows too.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="A new version of these rows alone.")] = False,
    file_mb: Annotated[int, typer.Option(help="About so many MB in a file.")] = 128,
) -> None:
    """Build a store of files, or of what a script makes of them. Killed and started again, it goes on.

    \b
    shoal data build "events/*.parquet" stores/events
    shoal data build script.py stores/clicks --engine "local[4]"
    shoal data build new.csv stores/events --append
    """
    from shoal.data.flow.sessions import session
    from shoal.data.store.build import BuildOptions

    options = BuildOptions(
        file_bytes=file_mb * 2**20, shapes=_shapes(shape or []), append=append, replace=replace
    )
    by = tuple(order.split(",")) if order else None
    with session(engine, memory=memory, threads=threads) as data:
        for name, flow in _flows(source, kind, data).items():
            url = f"{store.rstrip('/')}/{name}" if name else store
            begin = time.perf_counter()
            made = flow.write(url, order=by, options=options, tell=_Line(url))
            seconds = time.perf_counter() - begin
            rows, nbytes = made.manifest.rows, made.manifest.nbytes
            print(f"{url}: version {made.version}, {rows} rows, {size_text(nbytes)}, {seconds:.1f} s")


def sql(
    query: Annotated[
        str, typer.Argument(help="What is read stands in quotes after FROM or JOIN.", show_default=False)
    ],
    engine: Engine = "duckdb",
    memory: Memory = None,
    limit: Annotated[int, typer.Option(help="Show so many rows.")] = 20,
    write: Annotated[str | None, typer.Option(help="Make a store of the result.")] = None,
) -> None:
    """Ask a question over files, folders, stores and URLs.

    \b
    shoal data sql "select kind, count(*) as n from 'events/*.parquet' group by kind order by n desc"
    """
    from shoal.data.flow.sessions import session

    with session(engine, memory=memory) as data:
        flow = data.sql(query)
        if write is not None:
            made = flow.write(write)
            print(f"{write}: version {made.version}, {made.manifest.rows} rows")
            return
        rows = flow.head(limit + 1)
    cells = [[_cell(value) for value in row.values()] for row in rows[:limit]]
    print(columns([flow.columns, *cells]))
    if len(rows) > limit:
        print(f"the first {limit} rows: --limit shows more")


def _flows(source: str, kind: str | None, data: Session) -> dict[str, Flow]:
    if not source.endswith(".py"):
        return {"": data.read(source, kind)}
    from shoal.data.flow.flow import Flow

    function = getattr(_load(Path(source)), "build", None)
    if function is None or len(inspect.signature(function).parameters) != 1:
        raise ConfigError(
            f"{source} has no function build(data), which gives a flow, or flows by name; write one."
        )
    made = function(data)
    flows = made if isinstance(made, dict) else {"": made}
    wrong = [flow for flow in flows.values() if not isinstance(flow, Flow)]
    if wrong or not flows:
        shown = type(wrong[0]).__name__ if wrong else "nothing"
        raise ConfigError(
            f"build(data) of {source} gave {shown}; it gives a flow, or a dict of flows by name."
        )
    return flows


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no script {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # functions of a flow are found by their module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module


def _shapes(given: list[str]) -> dict[str, tuple[int, ...]]:
    """From words such as image=3x32x32.

    >>> _shapes(["image=3x32x32"])
    {'image': (3, 32, 32)}
    """
    shapes = {}
    for word in given:
        name, _, sizes = word.partition("=")
        if not sizes or not all(size.isdigit() for size in sizes.split("x")):
            raise ConfigError(f"--shape {word}: give a column and its sizes, as image=3x32x32.")
        shapes[name] = tuple(int(size) for size in sizes.split("x"))
    return shapes


class _Line:
    """A line that is written over, for people only: rows, bytes, and how long it will take."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begin = time.perf_counter()

    def __call__(self, rows: int, size: int, done: float) -> None:
        if sys.stderr.isatty():
            passed = time.perf_counter() - self._begin
            left = f", {passed * (1 - done) / done:.0f} s left" if 0.01 < done < 1 else ""
            text = f"{self._title}: {rows} rows, {size_text(size)}, {passed:.0f} s{left}"
            print(f"\r{text:78}", end="\r", file=sys.stderr, flush=True)


def _cell(value: object) -> str:
    text = "null" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
