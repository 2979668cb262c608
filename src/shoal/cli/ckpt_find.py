"""What a path given to `shoal ckpt` means: one checkpoint, or a folder of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.checkpoint.folder import CheckpointEntry, Outline


def find_outlines(path: Path) -> list[Outline]:
    """What is cheap to know of the checkpoints at a path: itself, or those in it with the latest first."""
    from shoal.checkpoint.folder import glance, in_order, outline
    from shoal.checkpoint.layout.head import FILE

    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; give a checkpoint, or a folder of checkpoints.")
    with suppress(PermissionError):  # then `glance` says so
        if (path / FILE).exists():
            return [outline(path)]
    found = in_order(glance(path))
    if not found:
        raise ConfigError(
            f"there is no checkpoint in {path}; give a folder with a {FILE}, or one that holds such folders."
        )
    return found


def find_all(path: Path) -> list[CheckpointEntry]:
    """The checkpoints at a path: itself, or those in it with the latest first."""
    from shoal.checkpoint.folder import open_folder

    return [open_folder(found.folder) for found in find_outlines(path)]


def find_readable(path: Path) -> CheckpointEntry:
    """One checkpoint whose manifest can be read: the one at a path, or the latest in it."""
    from shoal.checkpoint.folder import open_folder

    found = open_folder(find_outlines(path)[0].folder)
    if found.manifest is None:
        raise ConfigError(f"{found.problem}; choose another checkpoint.")
    return found


def find_whole(path: Path) -> CheckpointEntry:
    """One checkpoint of which every byte is what was written."""
    from shoal.checkpoint.verify import verify

    found = find_readable(path)
    problem = next(verify(found), None)
    if problem is not None:
        raise ConfigError(f"{found.folder} is damaged ({problem}); choose another checkpoint.")
    return found


def is_url(text: str) -> bool:
    """Whether something is at a URL, and not on a disk of this host.

    >>> is_url("s3://bucket/runs"), is_url("runs/first")
    (True, False)
    """
    return "://" in text
