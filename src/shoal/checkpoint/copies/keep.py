"""Which checkpoints stay: a pure rule, and the two who go by it.

Only what is called `step-N` was written by itself and goes by itself. Every other name was given by somebody and
stays; so does the latest, whatever its number.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.copies.remote import Remote
from shoal.checkpoint.folder import flush, glance, temporary
from shoal.config import fill_options, parse_choice
from shoal.errors import ConfigError

_AUTOMATIC = re.compile(r"step-([0-9]+)")


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

    def victims(self, found: Sequence[tuple[str, int, bool]]) -> list[str]:
        """Who has to go, oldest first, given name, step and whether it is the latest; the step is -1 where a
        manifest cannot be read. Such a one never counts as one of the last: it would push out what is whole."""
        numbers = {}
        for name, step, _ in found:
            match = _AUTOMATIC.fullmatch(name)
            if match is not None:
                numbers[name] = step if step >= 0 else int(match[1])
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


def prune(root: Path, keep: Keep, spare: Collection[str] = ()) -> list[str]:
    """Remove what does not stay from a folder of checkpoints, but not what is spared; returns the names removed."""
    found = glance(root)
    listed = [(name, outline.step, outline.latest) for name, outline in found.items()]
    gone = []
    for name in keep.victims(listed):
        if name not in spare and remove(found[name].folder):
            gone.append(name)
    return gone


def prune_remote(remote: Remote, keep: Keep, spare: Collection[str] = ()) -> list[str]:
    """The same for copies at a URL."""
    found = [(c.name, c.step, c.latest) for c in remote.candidates()]
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
