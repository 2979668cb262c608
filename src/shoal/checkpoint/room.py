"""Whether a checkpoint can be written to a folder, and what is said where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.errors import ConfigError
from shoal.sealed import write_file


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still write where a folder is, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def check_writable(folder: Path) -> None:
    """Write a small file there and remove it, or refuse the folder."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_file(probe, [b"shoal"])
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    """The refusal of a folder."""
    return ConfigError(
        f"the checkpoint folder {folder} cannot be written to ({reason_of(error)}); choose another folder, or see to "
        "its rights and its space."
    )


def check_room(folder: Path, needed: int) -> str:
    """Refuse a folder without space for one checkpoint of so many bytes; a sentence where there is none for two."""
    free, takes = megabytes(free_bytes(folder)), megabytes(needed)
    if free_bytes(folder) < needed:
        raise ConfigError(
            f"{folder} has {free} free, and a checkpoint takes about {takes}; free some space, or choose another "
            "checkpoint folder."
        )
    if free_bytes(folder) < 2 * needed:
        return (
            f"{folder} has {free} free, and a checkpoint takes about {takes}: a new one is written before an old one "
            "goes, so there should be space for two"
        )
    return ""


def room_facts(folder: Path, needed: int) -> str:
    """What is free and what a checkpoint takes."""
    try:
        return f"{megabytes(free_bytes(folder))} are free there and it takes {megabytes(needed)}"
    except OSError as error:
        return f"{folder} does not answer ({error.strerror})"


def reason_of(error: BaseException) -> str:
    """What happened, with the file.

    >>> reason_of(OSError(28, "No space left on device", "runs/x"))
    'runs/x: No space left on device'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def megabytes(size: float) -> str:
    """Bytes as people read them.

    >>> megabytes(1_250_000), megabytes(3e9), megabytes(700)
    ('1.2 MB', '3000.0 MB', '0.0 MB')
    """
    return f"{size / 1e6:.1f} MB"
