"""Which checkpoints stay: a pure rule, and the two who go by it.

Only what is called `step-N` was written by itself and goes by itself. Every other name was given by somebody and
stays; so does the latest, whatever its number. And a run removes only what was saved under the retention that it goes
by itself: what a run with another one has kept was kept on purpose.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.copies.remote import Remote
from shoal.checkpoint.folder import (
    Outline,
    flush,
    glance,
    latest,
    open_folder,
    plain_name,
    step_in,
    temporary,
)
from shoal.config import fill_options, parse_choice
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Keep:
    """How many of the automatic checkpoints stay.

    >>> found = [(f"step-{n}", n, n == 50) for n in (10, 20, 30, 40, 50)] + [("best", 10, False)]
    >>> Keep(last=2).victims(found)
    ['step-10', 'step-20', 'step-30']
    >>> Keep(last=2, every=20).victims(found)
    ['step-10', 'step-30']
    """

    last: int | None = 3
    """The newest so many; None keeps all."""
    every: int = 0
    """And all whose step can be divided by this, if it is above 0."""

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ConfigError(
                f"keep: last={self.last} would leave nothing to go on from; keep at least 1, or all with 'none'."
            )
        if self.every < 0:
            raise ConfigError(
                f"keep: every={self.every} is not a number of steps; give 1 or more, or 0 for none."
            )

    @staticmethod
    def of(given: int | str | None) -> Keep:
        """From what a user writes; None keeps all.

        >>> Keep.of(5), Keep.of("last=3, every=1000"), Keep.of(None)
        (Keep(last=5, every=0), Keep(last=3, every=1000), Keep(last=None, every=0))
        """
        if given is None or isinstance(given, int):
            return Keep(given)
        return fill_options(parse_choice(f"keep({given})", "keep"), Keep)

    def __str__(self) -> str:
        """As a user would write it.

        >>> str(Keep()), str(Keep(5, 1000)), str(Keep(None))
        ('3', 'last=5, every=1000', 'none')
        """
        if self.last is None:
            return "none"
        return f"last={self.last}, every={self.every}" if self.every else str(self.last)

    def victims(self, found: Sequence[tuple[str, int, bool]]) -> list[str]:
        """Who has to go, oldest first, given name, step and whether it is the latest; the step is -1 where a
        manifest cannot be read. Such a one never counts as one of the last: it would push out what is whole."""
        numbers = {}
        for name, step, _ in found:
            number = step_in(name)
            if number is not None:
                numbers[name] = step if step >= 0 else number
        whole = sorted((step for name, step, _ in found if name in numbers and step >= 0), reverse=True)
        if self.last is None or len(whole) <= self.last:
            return []
        oldest = whole[self.last - 1]
        firsts = {name for name, _, latest in found if latest}
        return sorted(
            (
                n
                for n, step in numbers.items()
                if step < oldest and n not in firsts and not self._regular(step)
            ),
            key=lambda name: numbers[name],
        )

    def _regular(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0


class Retention:
    """A run's own: what goes after each save. In the thread of rank 0 that writes."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._mine: dict[str, tuple[int, Path]] | None = None
        """Step and folder of what was saved under this retention, by name; None until it was looked for."""
        self._said = False

    def after(self, saved: Path, spare: Collection[str]) -> None:
        """A checkpoint has been saved: remove what is one too many, but neither that one nor what is spared."""
        root = saved.parent
        if self._mine is None:
            self._mine = self._look(root)
        number = step_in(saved.name)
        if number is not None:
            self._mine[saved.name] = number, saved
        first = latest(root)
        going = self._keep.victims([(name, step, name == first) for name, (step, _) in self._mine.items()])
        going = [name for name in going if name not in spare and name != saved.name]
        if not going:
            return
        problem = missing_bytes(saved)
        if problem:
            _say(f"{problem} although it has just been written; no older checkpoint is removed")
            return
        if not self._said:
            self._said = True
            _say(
                f"checkpoint_keep={self._keep} removes {', '.join(going)} from {root} now, and from here on one for "
                "each new one; checkpoint_keep=None keeps all"
            )
        for name in going:
            remove(self._mine.pop(name)[1])

    def _look(self, root: Path) -> dict[str, tuple[int, Path]]:
        """What is ours, of earlier lives of this run; says once what is not, and stays."""
        others = []
        mine = {}
        for name, outline in glance(root).items():
            if step_in(name) is None or outline.head is None:
                continue
            if outline.head.keep == str(self._keep):
                mine[name] = outline.step, outline.folder
            else:
                others.append(name)
        if others and self._keep.last is not None:
            _say(
                f"{root} has {len(others)} checkpoints that were saved under another retention than "
                f"checkpoint_keep={self._keep}: they stay until you remove them, as with shoal ckpt prune"
            )
        return mine


def missing_bytes(folder: Path) -> str:
    """What shows at a glance that a checkpoint is not whole: its manifest and the lengths of its files."""
    found = open_folder(folder)
    if found.manifest is None:
        return found.problem
    for name, facts in found.manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{folder / name} cannot be used: {error.strerror}"
        if size != facts.bytes:
            return f"{folder / name} has {size} bytes, and {facts.bytes} were written"
    return ""


def prune(root: Path, keep: Keep, spare: Collection[str] = ()) -> list[str]:
    """Remove what does not stay from a folder of checkpoints, but not what is spared; returns the names removed."""
    found = glance(root)
    gone = []
    for name in keep.victims(listed(found.values())):
        if name not in spare and remove(found[name].folder):
            gone.append(name)
    return gone


def listed(found: Collection[Outline]) -> list[tuple[str, int, bool]]:
    """What a retention may look at: not what nobody can read, which may be whole."""
    return [(plain_name(o.folder), o.step, o.latest) for o in found if not o.unreadable]


def prune_remote(
    remote: Remote, keep: Keep, spare: Collection[str] = (), own: str | None = None
) -> list[str]:
    """The same for copies at a URL; with `own`, of those only that were saved under this retention."""
    found = [
        (c.name, c.step, c.latest)
        for c in remote.candidates()
        if not c.unreadable and (own is None or c.keep == own)
    ]
    gone = [name for name in keep.victims(found) if name not in spare]
    for name in gone:
        remote.remove(name)
    return gone


def remove(folder: Path) -> bool:
    """Remove a checkpoint so that half of it is never taken for one; False where somebody else has."""
    # The name says nothing that `look` would take for a checkpoint, and `clean` removes what a crash leaves of it.
    away = temporary(folder.parent, folder.name.lstrip("."), "removed")
    shutil.rmtree(away, ignore_errors=True)
    try:
        os.rename(folder, away)
    except FileNotFoundError:
        return False
    flush(folder.parent)
    shutil.rmtree(away, ignore_errors=True)
    return True


def _say(sentence: str) -> None:
    print(f"shoal: {sentence}.", file=sys.stderr, flush=True)
