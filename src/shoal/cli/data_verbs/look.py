"""`shoal data ls|show|head|stats|diff`: what is in stores, and what has changed between versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.text_columns import columns, size_text
from shoal.errors import ConfigError

StoreUrl = Annotated[str, typer.Argument(help="A store: a folder or a URL.", show_default=False)]
Version = Annotated[int | None, typer.Option(help="Of the store; the newest by default.")]


def list_stores(
    folder: Annotated[str, typer.Argument(help="A store, or a folder of stores.", show_default=False)],
) -> None:
    """List the versions of a store, or the stores in a folder.

    \b
    shoal data ls stores
    """
    from shoal.data.store.places.open_place import open_place
    from shoal.data.store.versions import read_manifest

    place = open_place(folder)
    if place.versions():
        found = [(folder, version) for version in place.versions()]
    else:
        inner = [str(path) for path in sorted(Path(folder).glob("*/"))] if "://" not in folder else []
        found = [(one, open_place(one).versions()[-1]) for one in inner if open_place(one).versions()]
    if not found:
        raise ConfigError(f"there is no store at {folder}; is it the folder above?")
    rows = [["store", "version", "rows", "files", "size", "columns"]]
    for url, version in found:
        try:
            made = read_manifest(open_place(url), version)
        except ConfigError as error:
            rows.append([url, str(version), "", "", "", f"damaged: {error}"])
            continue
        names = ", ".join(made.columns)
        shown = names if len(names) < 50 else f"{names[:47]}..."
        rows.append([url, str(version), str(made.rows), str(len(made.files)), size_text(made.nbytes), shown])
    print(columns(rows, right=[1, 2, 3, 4]))


def show(store: StoreUrl, version: Version = None) -> None:
    """Show what a store holds, and what it was made of.

    \b
    shoal data show stores/events
    """
    from shoal.data.store.store import open_manifest

    made = open_manifest(store, version)
    rows = [["store", store], ["version", str(made.version)], ["rows", str(made.rows)]]
    rows += [["files", f"{len(made.files)}, {size_text(made.nbytes)}"]]
    rows += [["features", ", ".join(made.features)]] if made.features else []
    for entry in made.lineage:
        inputs = entry.get("inputs", [])
        size = sum(int(fact.get("bytes", 0)) for fact in inputs)
        rows.append(
            [
                f"version {entry['version']}",
                f"{entry['rows']} rows, {entry.get('engine', 'given')}, {len(inputs)} inputs of {size_text(size)}",
            ]
        )
    print(columns(rows))
    print()
    nulls = {name: sum(file.nulls.get(name, 0) for file in made.files) for name in made.columns}
    cells = [[name, kind, str(nulls[name] or "")] for name, kind in made.columns.items()]
    print(columns([["column", "type", "nulls"], *cells], right=[2]))


def head(
    store: StoreUrl, rows: Annotated[int, typer.Option(help="So many.")] = 10, version: Version = None
) -> None:
    """Print the first rows of a store.

    \b
    shoal data head stores/events --rows 3
    """
    from shoal.cli.data_verbs.build import _cell
    from shoal.data.store.store import Store

    opened = Store(store, version=version)
    found: list[list[str]] = []
    for batch in opened.record_batches(rows):
        found += [
            [_cell(value) for value in row.values()] for row in batch.slice(0, rows - len(found)).to_pylist()
        ]
        if len(found) >= rows:
            break
    print(columns([list(opened.manifest.columns), *found]))


def stats(
    store: StoreUrl,
    version: Version = None,
    png: Annotated[Path | None, typer.Option(help="Write the histograms to this picture.")] = None,
) -> None:
    """Ranges, means, nulls, frequent values and histograms of every column.

    \b
    shoal data stats stores/events --png events.png
    """
    from shoal.data.store.stats import bars, save_histograms, stats_of
    from shoal.data.store.store import Store

    found = stats_of(Store(store, version=version))
    rows = [["column", "type", "nulls", "min", "max", "mean", "deviation", "distinct"]]
    for one in found:
        facts = (one.low, one.high, one.mean, one.deviation, one.distinct)
        rows.append([one.name, one.kind, str(one.nulls), *(_number(fact) for fact in facts)])
    print(columns(rows, right=[2, 3, 4, 5, 6, 7]))
    for one in found:
        lines = [f"{count:>10}  {name}" for name, count in one.top] if one.top else bars(one)
        if lines:
            print(f"\n{one.name}{' (lengths)' if one.kind.startswith(('list', 'binary')) else ''}")
            print("\n".join(lines))
    if png is not None:
        save_histograms(str(png), found)
        print(f"\n{png}: {sum(bool(one.counts) for one in found)} histograms")


def diff(
    store: StoreUrl,
    old: Annotated[int | None, typer.Option("--from", help="A version; the one before by default.")] = None,
    new: Annotated[int | None, typer.Option("--to", help="A version; the newest by default.")] = None,
    other: Annotated[str | None, typer.Option(help="Another store, in place of an older version.")] = None,
) -> None:
    """What has changed between two versions: rows, columns, and columns whose values have shifted. Exit code 1 if so.

    \b
    shoal data diff stores/events
    shoal data diff stores/events --from 1 --to 3
    """
    from shoal.data.store.places.open_place import open_place
    from shoal.data.store.stats import DRIFT, drift
    from shoal.data.store.store import Store

    newer = Store(store, version=new)
    versions = [one for one in open_place(store).versions() if one < newer.version]
    if other is None and old is None and not versions:
        raise ConfigError(f"{store} has one version; name another store with --other.")
    before = Store(other) if other is not None else Store(store, version=old or versions[-1])
    first, second = before.manifest, newer.manifest
    same = {file.name for file in first.files} & {file.name for file in second.files}
    print(f"rows     {first.rows} -> {second.rows}")
    print(f"files    {len(first.files)} -> {len(second.files)}, {len(same)} in both")
    changed = [
        f"{name}: {first.columns.get(name, 'missing')} -> {second.columns.get(name, 'missing')}"
        for name in {**first.columns, **second.columns}
        if first.columns.get(name) != second.columns.get(name)
    ]
    print(f"columns  {'; '.join(changed) or 'the same'}")
    shifted = {name: by for name, by in drift(before, newer).items() if by >= DRIFT}
    for name, by in sorted(shifted.items(), key=lambda entry: -entry[1]):
        print(f"DRIFT    {name}: stability index {by:.2f}, from {DRIFT} on the values are of another kind")
    if changed or shifted or first.files != second.files:
        raise typer.Exit(1)


def _number(value: float | str | None) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)[:20]
