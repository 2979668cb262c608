"""Second copies of checkpoints, made while training goes on. Losing one is no reason to end a run.

One thread of rank 0 uploads. A checkpoint that is complete while another is on its way waits; a newer one takes the
place of the one that waits, so a slow line means fewer copies and never a queue that grows. At the end of a run it is
said which of the last checkpoints have no copy; the exit code stays 0, for they are whole in their folder.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from shoal.checkpoint.copies.keep import Keep, prune_remote
from shoal.checkpoint.copies.remote import Remote
from shoal.checkpoint.save import give_way

_QUIET = 3.0
"""Seconds that `close` waits before it says what for."""
_BETWEEN = 10.0
"""Seconds between two lines about that."""


class Copier:
    """Copies checkpoints to a URL and removes old copies there. Rank 0 has one."""

    def __init__(self, remote: Remote, keep: Keep, own: str | None = None) -> None:
        """`own`: remove only copies of what was saved under this retention."""
        self._remote = remote
        self._keep = keep
        self._own = own
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._active: Path | None = None
        self._thread: threading.Thread | None = None
        """There only while there is something to copy."""
        self._cleaned = False
        self._progress = (0, 0)
        self._missing: dict[str, Path] = {}
        """What could not be copied since the last that could, by name."""

    def add(self, folder: Path) -> None:
        """Copy a checkpoint as soon as may be. Returns at once."""
        with self._lock:
            self._waiting = folder
            if self._thread is None:
                # A daemon: a run that fails must end, and what is cut short is no checkpoint.
                self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
                self._thread.start()

    def busy(self) -> set[str]:
        """The checkpoints that are still needed here: the one being copied and the one that waits."""
        with self._lock:
            return {folder.name for folder in (self._active, self._waiting) if folder is not None}

    def close(self) -> None:
        """Until everything is copied. Says so if that takes long; an interrupt ends the wait."""
        begin = time.monotonic()
        pause = _QUIET
        while (thread := self._thread) is not None:
            thread.join(pause)
            if thread.is_alive():
                pause = _BETWEEN
                names = " and ".join(sorted(self.busy()))
                (done, total) = self._progress
                _say(
                    f"waiting for the copy of {names} to {self._remote.title} "
                    f"({done / 1e6:.0f} of {total / 1e6:.0f} MB, {time.monotonic() - begin:.0f} s so far)."
                )

    def say_what_is_missing(self) -> None:
        """At the end of a run: which checkpoints have no copy, if the newest has none."""
        here = {name: folder for name, folder in self._missing.items() if folder.exists()}
        if here:
            root = next(iter(here.values())).parent
            have = f"{', '.join(here)} {'has' if len(here) == 1 else 'have'} no copy at {self._remote.title}"
            _say(
                f"{have}; in {root} they are whole. Once that place answers, `shoal ckpt copy {root} "
                f"{self._remote.title}` makes up for it."
            )
        self._missing = {}

    # From here on in the thread.

    def _work(self) -> None:
        give_way()
        while (folder := self._next()) is not None:
            try:
                if not self._cleaned:  # what earlier runs have left; nothing of ours is on its way yet
                    self._remote.clean()
                    self._cleaned = True
                self._remote.upload(folder, self._tell)
                self._missing = {}
            except Exception as error:
                self._missing[folder.name] = folder
                _say(
                    f"the copy of {folder.name} to {self._remote.title} failed ({_plain(error)}); "
                    "training goes on, and the next checkpoint will be copied again."
                )
                continue
            try:
                prune_remote(self._remote, self._keep, own=self._own)
            except Exception as error:
                _say(f"old copies at {self._remote.title} could not be removed ({_plain(error)}); they stay.")

    def _next(self) -> Path | None:
        with self._lock:
            self._active = self._waiting
            self._waiting = None
            self._progress = (0, 0)
            if self._active is None:
                self._thread = None
            return self._active

    def _tell(self, done: int, total: int) -> None:
        self._progress = (done, total)


def _say(sentence: str) -> None:
    print(f"shoal: {sentence}", file=sys.stderr, flush=True)


def _plain(error: Exception) -> str:
    """As part of another sentence."""
    return str(error).rstrip(".") or type(error).__name__
