"""Checkpoints that wait to be evaluated: hard links, so that a run which prunes its folder meanwhile takes none away.

checkpoints/.evaluators/step-300/        links to the files of a checkpoint
checkpoints/.evaluators/step-300.lock    held by the evaluator that is at it
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.checkpoint.folder import glance, outline, step_in
from shoal.errors import ConfigError

FOLDER = ".evaluators"
MOST_WAITING = 8
"""Checkpoints that are kept for evaluators; with more of them training would fill the disk."""
LOOK_SECONDS = 0.1


def sign_of(step: object, written: object) -> str:
    """One checkpoint, also where another of its name was there before."""
    return f"{step} {written}"


class TakenCheckpoints:
    """What evaluators have taken of a checkpoint folder, and who is at it."""

    def __init__(self, root: Path, known: Callable[[], set[str]]) -> None:
        """`known`: those that have been evaluated."""
        self._root = root
        self._folder = root / FOLDER
        self._known = known
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="shoal-evaluator", daemon=True)

    def __enter__(self) -> TakenCheckpoints:
        self._thread.start()  # checkpoints come and go while this process computes
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> None:
        """Link what is new."""
        with suppress(OSError, ConfigError):
            known = self._known()
            waiting = {path.name for path in self.waiting()}
            new = [
                one
                for name, one in glance(self._root).items()
                if step_in(name) is not None
                and one.head is not None
                and sign_of(one.step, one.written) not in known
                and name not in waiting
            ]
            for one in sorted(new, key=lambda entry: entry.step)[: MOST_WAITING - len(waiting)]:
                self._link(one.folder)

    def waiting(self) -> list[Path]:
        """What was taken and is not evaluated, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [path for path in self._folder.iterdir() if step_in(path.name) is not None]
        return sorted(found, key=lambda path: step_in(path.name) or 0)

    @contextmanager
    def next(self) -> Iterator[Path | None]:
        """The oldest that nobody is at, until the block ends; None: there is none."""
        known = self._known()
        for path in self.waiting():
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                if not path.is_dir():
                    continue
                found = outline(path)
                if sign_of(found.step, found.written) in known:  # whoever did it died before it had tidied up
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                yield path
                shutil.rmtree(path, ignore_errors=True)
                os.unlink(f"{path}.lock")  # who waits for it looks for the folder afterwards
                return
            finally:
                os.close(lock)
        yield None

    def _link(self, folder: Path) -> None:
        """All files of a checkpoint, or nothing: it may be pruned at this moment."""
        self._folder.mkdir(exist_ok=True)
        part = self._folder / f".{folder.name}.{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            for entry in os.scandir(folder):
                if entry.is_file(follow_symlinks=False):
                    os.link(entry.path, part / entry.name)
            os.rename(part, self._folder / folder.name)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.take()
