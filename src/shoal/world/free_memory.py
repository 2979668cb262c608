"""How much memory is left for this process: of the host, and of the limits around it."""

from __future__ import annotations

from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")


def free_memory(groups: Path = GROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can still be used before somebody is killed for it: by the host, or by a control group (v2).

    >>> free_memory() > 0
    True
    """
    free = int(psutil.virtual_memory().available)
    for folder in _groups(groups, own):
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            free = min(free, limit - used + _cached(folder / "memory.stat"))
    return max(free, 0)


def _groups(groups: Path, own: Path) -> list[Path]:
    """The control group of this process and those around it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    names = [line[3:] for line in lines if line.startswith("0::/")]
    if not names:
        return []
    inner = groups / names[0].lstrip("/")
    return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(groups)]


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none, as for "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached(file: Path) -> int:
    """Bytes of files in memory that the kernel gives up before it refuses any."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("inactive_file ")]
    return int(found[0]) if found and found[0].isdigit() else 0
