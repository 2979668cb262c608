"""The files of a run's folder: who writes which, and which there are."""

from __future__ import annotations

import re
from pathlib import Path

_RANK = re.compile(r"(?:events|state|spans)-rank(\d{5,})\.(?:jsonl|json|bin)")
_ROLE = re.compile(r"events-([a-z][a-z0-9-]*)\.jsonl")


def events_path(folder: Path, who: int | str) -> Path:
    """The event log of a rank, or of another process such as "launcher".

    >>> [events_path(Path("run"), who).name for who in (0, 3, "launcher")]
    ['events.jsonl', 'events-rank00003.jsonl', 'events-launcher.jsonl']
    """
    if who == 0:
        return folder / "events.jsonl"
    return folder / (f"events-rank{who:05}.jsonl" if isinstance(who, int) else f"events-{who}.jsonl")


def spans_path(folder: Path, rank: int) -> Path:
    """The newest spans of a rank."""
    return folder / f"spans-rank{rank:05}.bin"


def state_path(folder: Path, rank: int) -> Path:
    """What a rank is doing, or did last."""
    return folder / f"state-rank{rank:05}.json"


def ranks_in(folder: Path) -> list[int]:
    """The ranks that have written into a folder.

    >>> ranks_in(Path("no such folder"))
    []
    """
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    found = {int(match[1]) for name in names if (match := _RANK.fullmatch(name))}
    return sorted(found | ({0} if "events.jsonl" in names else set()))


def roles_in(folder: Path) -> list[str]:
    """Other processes that have a log there: the launcher, for one."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    found = [match[1] for name in names if (match := _ROLE.fullmatch(name))]
    return sorted(role for role in found if not role.startswith("rank"))
