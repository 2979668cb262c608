"""`shoal data verify|copy|gc`: check every byte, copy elsewhere, remove what nobody needs."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from shoal.cli.data_verbs.look import StoreUrl, Version
from shoal.cli.text_columns import size_text


def verify(store: StoreUrl, version: Version = None) -> None:
    """Check every byte of a store. Exit code 1 if a file is damaged, and which of its bytes.

    \b
    shoal data verify stores/events
    """
    from shoal.data.store.places.open_place import open_place
    from shoal.data.store.verify import problems
    from shoal.data.store.versions import read_manifest

    place = open_place(store)
    manifest = read_manifest(place, version)
    begin = time.perf_counter()
    found = list(problems(place, manifest))
    seconds = time.perf_counter() - begin
    for problem in found:
        print(f"  {problem}")
    if found:
        print(f"{store}: version {manifest.version} is DAMAGED: {len(found)} of {len(manifest.files)} files")
        raise typer.Exit(1)
    speed = manifest.nbytes / seconds / 1e9
    print(f"{store}: version {manifest.version} is whole: {size_text(manifest.nbytes)}, {speed:.1f} GB/s")


def copy(
    source: StoreUrl,
    target: Annotated[str, typer.Argument(help="A folder or a URL.", show_default=False)],
    version: Version = None,
) -> None:
    """Copy a version of a store elsewhere; started again, it goes on with the files that are missing.

    \b
    shoal data copy stores/events s3://bucket/events
    """
    from shoal.data.store.places.open_place import open_place
    from shoal.data.store.upkeep import copy_store

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{size_text(done)} of {size_text(total)}      ", end="\r", file=sys.stderr, flush=True)

    made = copy_store(open_place(source), open_place(target), version, tell)
    print(f"{target}: version {made.version}, {made.rows} rows, {size_text(made.nbytes)}")


def gc(
    store: StoreUrl,
    keep: Annotated[
        int | None, typer.Option(help="Keep the newest so many versions; all by default.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove files that no version needs, and old versions; asks first.

    \b
    shoal data gc stores/events --keep 2
    """
    from shoal.data.store.places.open_place import open_place
    from shoal.data.store.upkeep import collect

    place = open_place(store)
    old, gone = collect(place, keep, dry=True)
    if not old and not gone:
        print(f"{store}: nothing to remove")
        return
    what = f"{len(old)} versions and {len(gone)} files of {size_text(sum(gone.values()))}"
    if not yes and not typer.confirm(f"remove {what} from {store}?"):
        raise typer.Exit(1)
    collect(place, keep)
    print(f"{store}: removed {what}")
