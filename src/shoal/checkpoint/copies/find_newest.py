"""Which checkpoint to go on from: the newest that is whole, wherever a copy of it is.

Every rank checks its share of the files, and all agree before anything is loaded. What is damaged is named, and the
next one tried: the same step from another place first, then older steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.checkpoint.folder import CheckpointEntry, glance, open_folder
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError
from shoal.world.world import World


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be whole."""

    name: str
    step: int
    """-1 where its manifest cannot be read."""
    latest: bool
    written: str = ""


class CheckpointPlace(Protocol):
    """Where copies of checkpoints are."""

    title: str

    def candidates(self) -> list[Candidate]:
        """What is there; the same on every rank. Every rank calls it."""

    def bring(self, name: str) -> Path:
        """Have a checkpoint in a folder that this rank can read. Every rank calls it."""


class LocalFolder:
    """A folder of checkpoints that all ranks see."""

    def __init__(self, world: World, root: Path) -> None:
        self._world = world
        self._root = root
        self.title = str(root)

    def candidates(self) -> list[Candidate]:
        mine = [Candidate(name, o.step, o.latest, o.written) for name, o in glance(self._root).items()]
        listed = self._world.gather_values([[c.name, c.step, c.latest, c.written] for c in mine])
        for rank, theirs in enumerate(listed):
            if theirs != listed[0]:
                raise ConfigError(
                    f"rank 0 finds {_newest(listed[0])} in {self._root} and rank {rank} finds {_newest(theirs)}; "
                    "the checkpoint folder must be one that all hosts see."
                )
        return mine

    def bring(self, name: str) -> Path:
        folder = self._root / name
        return folder if folder.exists() else self._root / f".{name}.old"


def find_whole(world: World, places: Sequence[CheckpointPlace]) -> CheckpointEntry | None:
    """The checkpoint to go on from, or None where there never was one. Every rank calls it."""
    listed = [(c, number) for number, place in enumerate(places) for c in place.candidates()]
    newest = max((c.step for c, number in listed if number == 0), default=0)

    def worth(entry: tuple[Candidate, int]) -> tuple[int, bool, int, str]:
        """`latest` is as good as the newest of its folder, even if somebody has moved it back."""
        candidate, number = entry
        first = candidate.latest and number == 0
        return max(candidate.step, newest) if first else candidate.step, first, -number, candidate.written

    listed.sort(key=worth, reverse=True)
    problems: list[str] = []
    for candidate, number in listed:
        found = open_folder(places[number].bring(candidate.name))
        problem = _first_problem(world, found)
        if problem is None:
            _tell(world, problems, f"going on from {found.folder}")
            return found
        problems.append(problem)
    if problems:
        raise ConfigError(
            f"none of the {len(problems)} checkpoints in {places[0].title} is whole ({problems[0]}); "
            "to begin from the beginning, move that folder away."
        )
    return None


def _first_problem(world: World, found: CheckpointEntry) -> str | None:
    """What is wrong with a checkpoint, in one sentence for all ranks; each looks at its share of the files."""
    names = list(found.manifest.files) if found.manifest is not None else []
    mine = next(verify(found, names[world.rank :: world.size]), None)
    return next((problem for problem in world.gather_values(mine) if problem is not None), None)


def _tell(world: World, problems: Sequence[str], remedy: str) -> None:
    if world.rank == 0:
        for problem in problems:
            print(f"shoal: a checkpoint is damaged ({problem}); {remedy}.", file=sys.stderr)


def _newest(listed: Sequence[tuple[str, int, bool, str]]) -> str:
    return f"step {max(entry[1] for entry in listed)}" if listed else "no checkpoint"
