"""A folder of checkpoints: how one comes into being all at once, which is the latest, and what lies around.

    runs/first/step-300/manifest.json, rank-0000.safetensors, …     a checkpoint
    runs/first/latest                                               the name of the newest
    runs/first/.step-400.<token>.shoal/                             one being written, or what a crash has left of it

A checkpoint is written under a name of its own, flushed, and renamed; then the folder is flushed; `latest` moves
last. So whatever moment the processes die at, what has a plain name was whole when it got it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.checkpoint.layout.manifest import FILE, Manifest, seal, unseal
from shoal.checkpoint.layout.shard_file import write_file
from shoal.errors import ConfigError

LATEST = "latest"
_OURS = ".shoal"
"""The end of names that nobody else gives: `clean` removes no other folder."""
ABANDONED = ".abandoned"
"""The end of the names of checkpoints that a run has gone back behind; kept, and never looked at."""


@dataclass(frozen=True)
class CheckpointEntry:
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


def check_target(root: Path, name: str) -> None:
    """Refuse to put a checkpoint in the place of something else."""
    final = root / check_name(name)
    ours = (final / FILE).exists() or (final.is_dir() and _has_shards(final))
    if (final.exists() or final.is_symlink()) and not ours:
        raise ConfigError(f"{final} is there already and is no checkpoint; choose another name.")


def abandon(root: Path, step: int) -> list[str]:
    """Set aside the automatic checkpoints of later steps: a run goes on from `step`, and they are of another future."""
    gone = []
    for name, outline in glance(root).items():
        match = re.fullmatch(r"step-([0-9]+)", name)
        if match is not None and (outline.step if outline.step >= 0 else int(match[1])) > step:
            away = root / f"{name}{ABANDONED}"
            shutil.rmtree(away, ignore_errors=True)
            os.rename(outline.folder, away)
            gone.append(name)
    return gone


def temporary(root: Path, name: str, token: str) -> Path:
    """Where the checkpoint `name` is written before it is one."""
    return root / f".{name}.{token}{_OURS}"


def commit(written: Path, final: Path) -> None:
    """Make what has been written a checkpoint, and the latest."""
    root = final.parent
    old = final.parent / f".{final.name}.old"
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


def look(root: Path) -> list[CheckpointEntry]:
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
            step = int(body["step"])
            written = str(body["written"])
        except (OSError, ValueError, KeyError, TypeError):
            step = -1
            written = ""
        found[CheckpointEntry(folder, None).name] = Outline(folder, step, written, False)
    first = latest(root)
    if first not in found:  # then the newest is
        first = max(found, key=lambda name: (found[name].step, found[name].written), default=None)
    return {name: outline._replace(latest=name == first) for name, outline in found.items()}


def open_folder(folder: Path) -> CheckpointEntry:
    """What is in one folder."""
    try:
        return CheckpointEntry(folder, Manifest.loads((folder / FILE).read_bytes()))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return CheckpointEntry(folder, None, f"{folder / FILE} cannot be used: {reason}")


def clean(root: Path) -> None:
    """Remove what crashes have left. Nobody may be writing."""
    whole = {folder.name for folder in _folders(root)}
    for entry in root.iterdir():
        if not entry.name.startswith(".") or entry.name in whole or entry.is_symlink():
            continue
        if entry.is_dir() and (entry.name.endswith(_OURS) or _is_replaced(entry)):
            shutil.rmtree(entry, ignore_errors=True)
        elif re.fullmatch(rf"\.{LATEST}\.[0-9]+", entry.name):
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
        if not entry.is_dir() or entry.name.endswith(ABANDONED):
            continue
        if not entry.name.startswith("."):
            if (entry / FILE).exists() or _has_shards(entry):
                yield entry  # without a manifest it is damaged, and to be named
        elif _is_replaced(entry) and not (root / entry.name[1:-4]).exists():
            yield entry  # died between two renames


def _is_replaced(entry: Path) -> bool:
    """A checkpoint that another of its name was about to replace."""
    return entry.name.endswith(".old") and (entry / FILE).exists()


def _has_shards(folder: Path) -> bool:
    return next(folder.glob("rank-*.safetensors"), None) is not None


def _rank(found: CheckpointEntry) -> tuple[int, str]:
    return (found.manifest.step, found.manifest.written) if found.manifest is not None else (-1, "")
