"""How much memory is left for this process: of the host, and of the limits around it."""

from __future__ import annotations

from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62
"""What version 1 of control groups says where there is none, or more."""


def free_memory(groups: Path = GROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can still be used before somebody is killed for it: by the host, or by a control group.

    >>> free_memory() > 0
    True
    """
    free = int(psutil.virtual_memory().available)
    for folder in _groups(groups, own):
        limit = _limit(folder)
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free = min(free, limit - used + _cached(folder / "memory.stat"))
    return max(free, 0)


def limits(groups: Path = GROUPS, own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What the control groups around this process may use, those without a limit left out."""
    return [limit for folder in _groups(groups, own) if (limit := _limit(folder)) is not None]


def _groups(groups: Path, own: Path) -> list[Path]:
    """The control group of this process and those around it: of version 2, and the memory group of version 1."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, name = line.split(":", 2)
        root = groups / "memory" if "memory" in kinds.split(",") else groups
        if not kinds or "memory" in kinds.split(","):
            inner = root / name.lstrip("/")
            found += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return found


def _limit(folder: Path) -> int | None:
    limit = _number(folder / "memory.max")
    limit = _number(folder / "memory.limit_in_bytes") if limit is None else limit
    return None if limit is None or limit >= _NO_LIMIT else limit


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
    found = [line.split()[1] for line in lines if line.startswith(("inactive_file ", "total_inactive_file "))]
    return int(found[-1]) if found and found[-1].isdigit() else 0  # a total comes last
