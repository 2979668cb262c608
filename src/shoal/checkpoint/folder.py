"""A folder of checkpoints: how one comes into being all at once, which is the latest, and what lies around.

    runs/first/step-300/manifest.json, rank-0000.safetensors, …     a checkpoint
    runs/first/latest                                               the name of the newest
    runs/first/.step-400.<token>/                                   one being written, or what a crash has left of it

A checkpoint is written under a name of its own, flushed, and renamed; then the folder is flushed; `latest` moves
last. So whatever moment the processes die at, every folder with a plain name is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.checkpoint.manifest import FILE, Manifest, seal, unseal
from shoal.checkpoint.shard import write_file
from shoal.errors import ConfigError

LATEST = "latest"


@dataclass(frozen=True)
class Found:
    """A checkpoint that was found, and what its manifest says; or why that cannot be read."""

    folder: Path
    manifest: Manifest | None
    problem: str = ""

    @property
    def name(self) -> str:
        return self.folder.name.lstrip(".").removesuffix(".old")


def check_name(name: str) -> str:
    """A name that a folder of checkpoints can have, or a refusal."""
    if not name or name == LATEST or name.startswith(".") or "/" in name:
        raise ConfigError(f"a checkpoint cannot be called '{name}'; use a plain name, such as 'final'.")
    return name


def temporary(root: Path, name: str, token: str) -> Path:
    """Where the checkpoint `name` is written before it is one."""
    return root / f".{name}.{token}"


def commit(written: Path, final: Path) -> None:
    """Make what has been written a checkpoint, and the latest."""
    root, old = final.parent, final.parent / f".{final.name}.old"
    flush(written)
    if final.exists():  # the same name again: until the new one is in its place, `look` finds the old
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(written, final)
    flush(root)
    shutil.rmtree(old, ignore_errors=True)
    point_to(root, final.name)


def point_to(root: Path, name: str) -> None:
    """Make a checkpoint the latest."""
    pointer = root / f".{LATEST}.{os.getpid()}"
    write_file(pointer, [seal(name)])
    os.replace(pointer, root / LATEST)
    flush(root)


def latest(root: Path) -> str | None:
    """The name of the latest checkpoint; None where there is none, or no telling."""
    try:
        name = unseal((root / LATEST).read_bytes())
    except (OSError, ValueError):
        return None
    return name if isinstance(name, str) else None


def look(root: Path) -> list[Found]:
    """The checkpoints of a folder: the latest first, then the others, newest first."""
    if not root.is_dir():
        return []
    first = latest(root)
    found = [open_folder(folder) for folder in _folders(root)]
    last = {f.name: _rank(f) for f in found}
    return sorted(found, key=lambda f: (f.name == first, last[f.name]), reverse=True)


class Outline(NamedTuple):
    """What is cheap to know of a checkpoint."""

    folder: Path
    step: int
    """-1 where its manifest cannot be read."""
    written: str
    latest: bool


def glance(root: Path) -> dict[str, Outline]:
    """The checkpoints of a folder by name, without a look at their tensors; at most one of them is the latest."""
    found: dict[str, Outline] = {}
    for folder in _folders(root) if root.is_dir() else ():
        try:
            body = unseal((folder / FILE).read_bytes())
            step, written = int(body["step"]), str(body["written"])
        except (OSError, ValueError, KeyError, TypeError):
            step, written = -1, ""
        found[Found(folder, None).name] = Outline(folder, step, written, False)
    first = latest(root)
    if first not in found:  # then the newest is
        first = max(found, key=lambda name: (found[name].step, found[name].written), default=None)
    return {name: outline._replace(latest=name == first) for name, outline in found.items()}


def open_folder(folder: Path) -> Found:
    """What is in one folder."""
    try:
        return Found(folder, Manifest.loads((folder / FILE).read_bytes()))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return Found(folder, None, f"{folder / FILE} cannot be used: {reason}")


def clean(root: Path) -> None:
    """Remove what crashes have left. Nobody may be writing."""
    whole = {folder.name for folder in _folders(root)}
    for entry in root.iterdir():
        if entry.name.startswith(".") and entry.name not in whole:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(f".{LATEST}."):
                entry.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """See a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(root: Path) -> Iterator[Path]:
    for entry in sorted(root.iterdir()):
        if not entry.is_dir():
            continue
        if not entry.name.startswith("."):
            if (entry / FILE).exists():
                yield entry
        elif entry.name.endswith(".old") and not (root / entry.name[1:-4]).exists():
            yield entry  # died between two renames


def _rank(found: Found) -> tuple[int, str]:
    return (found.manifest.step, found.manifest.written) if found.manifest is not None else (-1, "")
