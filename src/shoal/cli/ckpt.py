"""`shoal ckpt`: look at checkpoints, check them, and clear them away."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.checkpoint.folder import plain_name
from shoal.cli.ckpt_find import find_all, find_outlines, find_readable, find_whole, is_url
from shoal.cli.text_columns import columns, size_text
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.checkpoint.folder import CheckpointEntry, Outline
    from shoal.checkpoint.layout.manifest import Manifest

Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or a folder of them: then its latest.", show_default=False)
]
Folder = Annotated[Path, typer.Argument(help="A folder of checkpoints.", show_default=False)]
Either = Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them: all.", show_default=False)]


def list_checkpoints(
    folder: Annotated[str, typer.Argument(help="A folder of checkpoints, or its URL.", show_default=False)],
) -> None:
    """List the checkpoints in a folder, the latest first.

    \b
    shoal ckpt ls runs/first
    shoal ckpt ls s3://bucket/runs/first
    """
    if is_url(folder):
        from shoal.checkpoint.copies.remote import Remote

        rows = [["name", "step", "written", ""]]
        for c in Remote(folder).candidates():
            note = "unreadable" if c.unreadable else "damaged" if c.step < 0 else "latest" if c.latest else ""
            rows.append([c.name, str(c.step) if c.step >= 0 else "", _when(c.written), note])
    else:
        rows = [["name", "step", "written", "plan", "workers", "size", ""]]
        for number, found in enumerate(find_outlines(Path(folder))):
            rows.append([plain_name(found.folder), *_facts(found), _note(found, number == 0)])
    if len(rows) == 1:
        raise ConfigError(f"there is no checkpoint at {folder}; is it the folder above?")
    print(columns(rows, right=[1, 4, 5]))


def show(
    checkpoint: Checkpoint,
    limit: Annotated[int, typer.Option(help="So many tensors, the largest first.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Every tensor.")] = False,
) -> None:
    """Show what a checkpoint holds.

    \b
    shoal ckpt show runs/first
    shoal ckpt show runs/first/step-300 --all
    """
    found = find_readable(checkpoint)
    manifest = found.manifest
    assert manifest is not None
    rows = [
        ["checkpoint", str(found.folder)],
        ["step", str(manifest.step)],
        ["written", _when(manifest.written)],
        ["plan", f"{manifest.plan}, {_count(manifest.workers, 'worker')}"],
        ["versions", ", ".join(f"{name} {text}" for name, text in manifest.versions.items())],
        ["files", f"{len(manifest.files)}, {size_text(_bytes(manifest))}"],
        ["tensors", f"{len(manifest.tensors)}, {size_text(manifest.nbytes)}"],
    ]
    rows += [[f"state {key}", _short(value)] for key, value in manifest.state.items()]
    print(columns(rows))
    print()
    print(columns(list(_tensors(manifest, None if everything else limit)), right=[3, 4]))
    left = len(manifest.tensors) - limit
    if left > 0 and not everything:
        print(f"and {left} more: --all shows them")


def verify(checkpoint: Either) -> None:
    """Check every byte, and name each tensor that is damaged. Exit code 1 if one is, or cannot be read.

    \b
    shoal ckpt verify runs/first
    shoal ckpt verify runs/first/step-300
    """
    from shoal.checkpoint.folder import Unreadable

    damaged = 0
    closed = 0
    listed = find_all(checkpoint)
    for found in listed:
        begin = time.perf_counter()
        try:
            problems = list(_verify(found))
        except Unreadable as error:
            closed += 1
            print(f"{found.name}: UNREADABLE\n  {error}")
            continue
        seconds = time.perf_counter() - begin
        if problems:
            damaged += 1
            print(f"{found.name}: DAMAGED")
            for problem in problems:
                print(f"  {problem}")
        elif found.manifest is not None:
            size = _bytes(found.manifest)
            files = _count(len(found.manifest.files), "file")
            print(f"{found.name}: whole: {size_text(size)} in {files}, {size / seconds / 1e9:.1f} GB/s")
    if damaged:
        print(f"{damaged} of {_count(len(listed), 'checkpoint')} damaged")
    if closed:
        print(f"{closed} of {_count(len(listed), 'checkpoint')} cannot be read")
    if damaged or closed:
        raise typer.Exit(1)


def prune(
    folder: Folder,
    keep: Annotated[int, typer.Option(help="Keep the newest so many.")] = 3,
    every: Annotated[int, typer.Option(help="Keep those whose step this divides, too.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove old checkpoints called step-N; asks first. What you have named yourself stays, and so does the latest.

    \b
    shoal ckpt prune runs/first --keep 3 --every 1000
    """
    from shoal.checkpoint.copies.keep import Keep, listed, remove

    found = find_outlines(folder)
    if found[0].folder == folder:
        raise ConfigError(f"{folder} is a checkpoint itself; name the folder it is in.")
    by_name = {plain_name(f.folder): f for f in found}
    victims = Keep(keep, every).victims(listed([found[0]._replace(latest=True), *found[1:]]))
    spared = _newest_whole(folder, found) if victims else None
    going = [by_name[name] for name in victims if name != spared]
    if not going:
        print(f"nothing to remove: {_count(len(found), 'checkpoint')} in {folder}")
        return
    rows = [["name", "step", "written", "plan", "workers", "size"]]
    print(columns([*rows, *([plain_name(f.folder), *_facts(f)] for f in going)], right=[1, 4, 5]))
    total = size_text(sum(f.head.nbytes for f in going if f.head is not None))
    question = f"remove {_count(len(going), 'checkpoint')} of {len(found)}, {total}?"
    if not yes and not typer.confirm(question):
        print("nothing is removed")
        return
    for one in going:
        remove(one.folder)
    print(f"removed {_count(len(going), 'checkpoint')}, {total}; {len(found) - len(going)} left")


def copy(
    source: Annotated[str, typer.Argument(help="A checkpoint, or a folder of them: all; or the URL of one.")],
    target: Annotated[str, typer.Argument(help="A URL; for the URL of a checkpoint, a local folder.")],
) -> None:
    """Copy checkpoints to a URL, or one from a URL to a folder. Each is checked before it counts as a checkpoint there.

    \b
    shoal ckpt copy runs/first s3://bucket/runs/first
    shoal ckpt copy s3://bucket/runs/first/step-300 runs/first
    """
    from shoal.checkpoint.copies.remote import Remote

    if is_url(source) == is_url(target):
        raise ConfigError(f"copy {source} {target}: one of the two is a URL, as s3://bucket/runs/first.")
    if is_url(source):
        above, _, name = source.rstrip("/").rpartition("/")
        print(f"{source} -> {Remote(above).download(name, Path(target))}")
        return
    remote = Remote(target)
    for found in reversed(find_all(Path(source))):  # the latest last, as it will be the latest there
        whole = find_whole(found.folder)
        remote.upload(whole.folder, _progress(whole.name))
        print(f"{whole.folder} -> {remote.title}/{whole.name}")


def _verify(found: CheckpointEntry) -> Iterator[str]:
    from shoal.checkpoint.verify import verify as problems

    if found.manifest is None:
        yield from problems(found)
        return
    tell = _progress(found.name)
    done = 0
    total = _bytes(found.manifest)
    for name, facts in found.manifest.files.items():
        yield from problems(found, [name])
        done += facts.bytes
        tell(done, total)


def _newest_whole(folder: Path, outlines: list[Outline]) -> str:
    from shoal.checkpoint.folder import Unreadable, open_folder

    for outline in sorted(outlines, key=lambda o: o.step, reverse=True):
        found = open_folder(outline.folder)
        with suppress(Unreadable):  # it stays, and nobody can say that it is whole
            if next(_verify(found), None) is None:
                return found.name
    raise ConfigError(
        f"none of the {len(outlines)} checkpoints in {folder} is whole; nothing is removed. See shoal ckpt verify."
    )


def _progress(name: str) -> Callable[[int, int], None]:
    """A line that is written over, for people only."""

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            text = f"{name}: {size_text(done)} of {size_text(total)}"
            print(f"\r{text:60}", end="\r" if done >= total else "", file=sys.stderr, flush=True)

    return tell


def _facts(found: Outline) -> list[str]:
    head = found.head
    if head is None:
        return ["", "", "", "", ""]
    return [str(head.step), _when(head.written), head.plan, str(head.workers), size_text(head.nbytes)]


def _note(found: Outline, first: bool) -> str:
    notes = ["latest"] if first else []
    if found.head is None:
        notes.append(f"{'unreadable' if found.unreadable else 'damaged'}: {found.problem}")
    return ", ".join(notes)


def _tensors(manifest: Manifest, limit: int | None) -> Iterator[list[str]]:
    yield ["tensor", "shape", "dtype", "bytes", "slices"]
    largest = sorted(manifest.tensors.items(), key=lambda entry: -entry[1].nbytes)
    for path, tensor in largest[:limit]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield [path, str(list(tensor.shape)), dtype, size_text(tensor.nbytes), str(len(tensor.slices))]


def _bytes(manifest: Manifest) -> int:
    return sum(facts.bytes for facts in manifest.files.values())


def _when(written: str) -> str:
    """To the second.

    >>> _when("2026-11-16T05:56:42.123+00:00")
    '2026-11-16 05:56:42 UTC'
    """
    return f"{written[:19].replace('T', ' ')} UTC" if written else ""


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
