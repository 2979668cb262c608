"""Which checkpoint to go on from: the newest that is whole, wherever a copy of it is.

Every rank checks its share of the files, and all agree before anything is loaded. What is damaged is named, and the
next one tried: the same step from another place first, then older steps. What cannot be read is not damaged: there,
a run stops and says so.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.checkpoint.folder import CheckpointEntry, Unreadable, glance, open_folder, step_in
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
    keep: str = ""
    """The retention that it was saved under."""
    unreadable: bool = False
    """It may be whole all the same; its step is then what its name says."""


_Listed = tuple[str, int, bool, str, str, bool]
"""A candidate as ranks tell each other."""
_QUIET = 10.0
"""Seconds of reading between two lines about it."""


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
        mine = []
        problem = ""
        try:
            mine = [
                (name, o.step, o.latest, o.written, o.unreadable) for name, o in glance(self._root).items()
            ]
        except Unreadable as error:
            problem = str(error)
        told = self._world.gather_values([mine, problem])
        for _, text in told:
            if text:
                raise Unreadable(text)
        everyone = [theirs for theirs, _ in told]
        # One host may read what another may not: then nobody goes by it.
        closed = {name for theirs in everyone for name, *_, unreadable in theirs if unreadable}
        listed = [[_seen(entry, closed) for entry in theirs] for theirs in everyone]
        for rank, theirs in enumerate(listed):
            if theirs != listed[0]:
                raise ConfigError(
                    f"rank 0 finds {_newest(listed[0])} in {self._root} and rank {rank} finds {_newest(theirs)}; "
                    "the checkpoint folder must be one that all hosts see."
                )
        return [Candidate(*entry) for entry in listed[0]]

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
        with _patiently(world, found.folder):
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
    closed = ""
    mine = None
    try:
        mine = next(verify(found, names[world.rank :: world.size]), None)
    except Unreadable as error:
        closed = str(error)
    everyone = world.gather_values([mine, closed])
    for _, text in everyone:
        if text:
            raise Unreadable(
                f"{text}. It may be whole, so this run neither goes on from an older checkpoint nor begins anew: see "
                "to it that the file can be read, or move that checkpoint out of the folder to go on without it."
            )
    return next((problem for problem, _ in everyone if problem is not None), None)


@contextmanager
def _patiently(world: World, folder: Path) -> Iterator[None]:
    """Say now and then that a checkpoint is still being read: a device may be slow, and the run is not stuck."""
    done = threading.Event()
    begin = time.monotonic()

    def tell() -> None:
        while not done.wait(_QUIET):
            text = f"still reading and checking {folder} ({time.monotonic() - begin:.0f} s so far)"
            print(f"shoal: {text}.", file=sys.stderr, flush=True)

    if world.rank == 0:
        threading.Thread(target=tell, name="reading", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _tell(world: World, problems: Sequence[str], remedy: str) -> None:
    if world.rank == 0:
        for problem in problems:
            print(f"shoal: a checkpoint is damaged ({problem}); {remedy}.", file=sys.stderr)


def _seen(entry: tuple[str, int, bool, str, bool], closed: Collection[str]) -> _Listed:
    """A candidate, by its name alone where somebody cannot read it."""
    name, step, latest, written, _ = entry
    if name not in closed:
        return name, step, latest, written, "", False
    number = step_in(name)
    return name, -1 if number is None else number, latest, "", "", True


def _newest(listed: Sequence[_Listed]) -> str:
    return f"step {max(entry[1] for entry in listed)}" if listed else "no checkpoint"
