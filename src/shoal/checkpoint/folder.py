"""A folder of checkpoints: how one comes into being all at once, which is the latest, and what lies around.

    runs/first/step-300/manifest.json, rank-0000.safetensors, …     a checkpoint
    runs/first/latest                                               the name of the newest
    runs/first/.step-400.<token>.shoal/                             one being written, or what a crash has left of it
    runs/first/step-500.abandoned/                                  set aside; nothing reads or removes it
    runs/first/.lock                                                who works here now (`lock.py`)

A checkpoint is written under a name of its own, flushed, and renamed; then the folder is flushed; `latest` moves
last. So whatever moment the processes die at, what has a plain name was whole when it got it.

What is damaged and what cannot be read are two things: of the first the bytes are wrong, and an older checkpoint may
do; the second may be whole, and nobody may act as if it were not there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.checkpoint.layout.head import FILE, Head, NewerFormat, read_head
from shoal.errors import ConfigError
from shoal.sealed import read_file, seal, unseal, write_file

if TYPE_CHECKING:
    from shoal.checkpoint.layout.manifest import Manifest

LATEST = "latest"
_OURS = ".shoal"
"""The end of names that nobody else gives: `clean` removes no other folder."""
ABANDONED = ".abandoned"
"""The end of the names of checkpoints that a run has gone back behind; kept, and never looked at."""
_ASIDE = re.compile(r".*\.abandoned(-[0-9]+)?")
_STEP = re.compile(r"step-([0-9]+)")


class Unreadable(ConfigError):
    """Somebody has to see to it that a file can be read: nobody may act as if it were damaged."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint that was found, and what its manifest says; or why that cannot be read."""

    folder: Path
    manifest: Manifest | None
    problem: str = ""
    unreadable: bool = False
    """Whether it may be whole all the same: no right to read it, a device that does not answer, a newer format."""

    @property
    def name(self) -> str:
        return plain_name(self.folder)


class Outline(NamedTuple):
    """What is cheap to know of a checkpoint."""

    folder: Path
    head: Head | None
    latest: bool = False
    problem: str = ""
    unreadable: bool = False

    @property
    def step(self) -> int:
        """-1 where its manifest cannot be read."""
        return self.head.step if self.head is not None else -1

    @property
    def written(self) -> str:
        return self.head.written if self.head is not None else ""


def plain_name(folder: Path) -> str:
    """What a checkpoint is called, also where it was about to be replaced when its process died."""
    return folder.name.lstrip(".").removesuffix(".old")


def check_name(name: str) -> str:
    """A name that a folder of checkpoints can have, or a refusal."""
    if not name or name == LATEST or name.startswith(".") or "/" in name:
        raise ConfigError(f"a checkpoint cannot be called '{name}'; use a plain name, such as 'final'.")
    return name


def step_in(name: str) -> int | None:
    """The step of an automatic checkpoint, by its name.

    >>> step_in("step-300"), step_in("best")
    (300, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match is not None else None


def check_target(root: Path, name: str) -> None:
    """Refuse to put a checkpoint in the place of something else."""
    final = root / check_name(name)
    try:
        ours = _has_manifest(final) or (final.is_dir() and _has_shards(final))
    except OSError:  # closed to us: nothing takes its place
        ours = False
    if os.path.lexists(final) and not ours:
        raise ConfigError(f"{final} is there already and is no checkpoint; choose another name.")


def abandon(root: Path, step: int) -> dict[str, str]:
    """Set aside the automatic checkpoints of later steps: a run goes on from `step`, and they are of another future.

    Returns what each is called now. None of them goes, nor what was set aside before.
    """
    gone = {}
    for name, outline in glance(root).items():
        number = step_in(name)
        if number is not None and (outline.step if outline.step >= 0 else number) > step:
            gone[name] = _free_name(root, f"{name}{ABANDONED}")
            os.rename(outline.folder, root / gone[name])
    return gone


def temporary(root: Path, name: str, token: str) -> Path:
    """Where the checkpoint `name` is written before it is one."""
    return root / f".{name}.{token}{_OURS}"


def commit(written: Path, final: Path) -> None:
    """Make what has been written a checkpoint, and the latest."""
    root = final.parent
    old = final.parent / f".{final.name}.old"
    pointer = _new_pointer(root, final.name)  # a disk that is full says so before anything has moved
    flush(written)
    if final.exists():  # the same name again: until the new one is in its place, `look` finds the old
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(written, final)
    flush(root)
    shutil.rmtree(old, ignore_errors=True)
    os.replace(pointer, root / LATEST)
    flush(root)


def point_to(root: Path, name: str) -> None:
    """Make a checkpoint the latest."""
    os.replace(_new_pointer(root, name), root / LATEST)
    flush(root)


def latest(root: Path) -> str | None:
    """The name of the latest checkpoint; None where there is none, or no telling."""
    try:
        name = unseal(read_file(root / LATEST))
    except (OSError, ValueError):
        return None
    return name if isinstance(name, str) else None


def look(root: Path) -> list[CheckpointEntry]:
    """The checkpoints of a folder: the latest first, then the others, newest first."""
    return [open_folder(outline.folder) for outline in in_order(glance(root))]


def in_order(found: dict[str, Outline]) -> list[Outline]:
    """The latest first, then the others, newest first."""
    return sorted(found.values(), key=lambda o: (o.latest, o.step, o.written), reverse=True)


def glance(root: Path) -> dict[str, Outline]:
    """The checkpoints of a folder by name, without a look at their tensors; at most one of them is the latest."""
    first = latest(root)
    found = {plain_name(folder): outline(folder) for folder in _folders(root, first)}
    if first not in found:  # then the newest is
        first = max(found, key=lambda name: (found[name].step, found[name].written), default=None)
    if first is not None:
        found[first] = found[first]._replace(latest=True)
    return found


def holds_any(root: Path) -> bool:
    """Whether a folder has a checkpoint in it, whole or not."""
    return next(_folders(root, latest(root)), None) is not None


def outline(folder: Path) -> Outline:
    """What is cheap to know of one checkpoint."""
    try:
        return Outline(folder, read_head(read_file(folder / FILE)))
    except (OSError, ValueError) as error:
        return Outline(folder, None, False, problem_of(folder / FILE, error), is_unreadable(error))


def open_folder(folder: Path) -> CheckpointEntry:
    """What is in one folder."""
    from shoal.checkpoint.layout.manifest import (
        Manifest,
    )  # with torch, which a look at a folder does not need

    try:
        return CheckpointEntry(folder, Manifest.loads(read_file(folder / FILE)))
    except (OSError, ValueError) as error:
        return CheckpointEntry(folder, None, problem_of(folder / FILE, error), is_unreadable(error))


def problem_of(path: Path, error: OSError | ValueError) -> str:
    """Why a file cannot be used, in one sentence without its end."""
    return f"{path} cannot be used: {(error.strerror or error) if isinstance(error, OSError) else error}"


def is_unreadable(error: OSError | ValueError) -> bool:
    """Whether what could not be read may be whole: all but a file that is not there, or has wrong bytes."""
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, NewerFormat) or (isinstance(error, OSError) and not isinstance(error, missing))


def clean(root: Path) -> list[str]:
    """Remove what crashes have left; returns of which checkpoints. Nobody may be writing."""
    whole = {folder.name for folder in _folders(root, latest(root))}
    halves = []
    for entry in root.iterdir():
        if not entry.name.startswith(".") or entry.name in whole or entry.is_symlink():
            continue
        if entry.is_dir() and (entry.name.endswith(_OURS) or _is_replaced(entry)):
            shutil.rmtree(entry, ignore_errors=True)
            halves.append(entry.name[1:].partition(".")[0])
        elif re.fullmatch(rf"\.{LATEST}\.[0-9]+", entry.name):
            entry.unlink(missing_ok=True)
    return halves


def flush(path: Path) -> None:
    """See a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(root: Path, first: str | None) -> Iterator[Path]:
    """Where checkpoints are, by name; `first` is the latest."""
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise Unreadable(
            f"the checkpoint folder {root} cannot be looked into ({error.strerror}); see to its rights, or choose "
            "another folder."
        ) from error
    for name in names:
        if _ASIDE.fullmatch(name):
            continue
        entry = root / name
        try:
            if not name.startswith("."):
                if _has_manifest(entry) or _has_shards(entry):
                    yield entry  # without a manifest it is damaged, and to be named
            elif name.endswith(".old") and _is_replaced(entry) and not (root / name[1:-4]).exists():
                yield entry  # died between two renames
        except OSError:  # closed to us: of others, or one of ours that may be whole
            if name == first or step_in(name) is not None:
                yield entry


def _new_pointer(root: Path, name: str) -> Path:
    pointer = root / f".{LATEST}.{os.getpid()}"
    write_file(pointer, [seal(name)])
    return pointer


def _is_replaced(entry: Path) -> bool:
    """A checkpoint that another of its name was about to replace."""
    return entry.name.endswith(".old") and _has_manifest(entry)


def _has_manifest(folder: Path) -> bool:
    """Whether there is something called so; an OSError where one cannot tell."""
    try:
        os.stat(folder / FILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _has_shards(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(re.fullmatch(r"rank-.*\.safetensors", entry.name) for entry in entries)


def _free_name(root: Path, name: str) -> str:
    """This name, or the first with a number that is free."""
    number = 2
    free = name
    while os.path.lexists(root / free):
        free = f"{name}-{number}"
        number += 1
    return free
