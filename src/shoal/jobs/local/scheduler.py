"""The scheduler: whoever holds the lock of the queue reads it, decides and carries that out, until there is no work.

There is no daemon to install. Who submits or looks at jobs starts a scheduler where none runs, and so does every
supervisor of a job. It may be killed at any moment: all it knows is in the store.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from shoal.jobs.local import lock
from shoal.jobs.local.decide import decide
from shoal.jobs.local.host import read_host
from shoal.jobs.local.state import Drop, Start, Stop
from shoal.jobs.local.store import Row, Store, boot_id

POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""So often it looks for jobs whose processes are gone, and at the clock."""
IDLE_SECONDS = 3.0
"""After so long without work it ends."""
AGAIN_SECONDS = 1.0
"""A scheduler that ended within such a time is not replaced before."""
MOST_LOSSES = 20
"""So often a job's supervisor may be lost on a machine that stays up; then the job is what ends it."""
LOCK = "scheduler.lock"


def ensure(folder: Path) -> bool:
    """Start a scheduler, in a session of its own, where none runs; False where one has just failed to stay."""
    held = lock.take(folder / LOCK)
    if held is None:
        return True
    try:
        last = os.fstat(held)
        if last.st_size and abs(time.time() - last.st_mtime) < AGAIN_SECONDS:
            return False  # it was killed, or it fails, and so would the next
        os.pwrite(held, b"1", 0)
        os.utime(held)
        with (folder / "scheduler.log").open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "shoal.jobs.local", "schedule", str(folder), str(held)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[held],  # it holds the lock from the beginning, so that nobody starts a second one
                cwd="/",
            )
    finally:
        os.close(held)
    return True


def main(folder: Path, held: int) -> None:
    """Schedule until there is nothing left to do; `held`: the lock, which whoever started it has taken."""
    store = Store(folder)
    os.set_inheritable(held, False)
    mine: int | None = held
    while mine is not None:
        try:
            Scheduler(store).run()
        finally:
            os.close(mine)
        # Whoever submitted while the lock was still held has started nobody: look once more.
        mine = lock.take(folder / LOCK) if store.has_work() else None


class Scheduler:
    """Carries out decisions while it holds the lock."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._children: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        """Until nothing has been there to do for a while."""
        store = self._store
        version = -1
        looked = worked = time.monotonic()
        while True:
            now = time.monotonic()
            if now - looked >= LOOK_SECONDS or version < 0:
                self.recover()
                looked = now
                version = -1
            if (newest := store.version()) != version or version < 0:
                version = newest
                self.act()
                if store.has_work():
                    worked = time.monotonic()
                elif time.monotonic() - worked > IDLE_SECONDS:
                    return
            self._children = [child for child in self._children if child.poll() is None]
            time.sleep(POLL_SECONDS)

    def act(self) -> None:
        """One decision, carried out."""
        now = time.time()
        for action in decide(self._store.read(read_host(self._store.folder), now), now):
            if isinstance(action, Start):
                self._start(action, now)
            elif isinstance(action, Stop):
                self._store.ask(action.job, action.why, now)
            elif isinstance(action, Drop):
                self._store.drop(action.job, action.why, now)

    def _start(self, action: Start, now: float) -> None:
        """The lock is taken before the supervisor exists, and inherited: at no moment does a started job lack it."""
        row = self._store.get(action.job)
        if row is None:
            return
        file = lock_file(self._store, row.id, row.attempt + 1)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = lock.take(file)
        if held is None:
            return
        try:
            attempt = self._store.begin(action.job, action.workers, action.cards, now)
            if attempt != row.attempt + 1:
                return
            command = [sys.executable, "-m", "shoal.jobs.local", "supervise", str(self._store.folder)]
            with (self._store.folder / "scheduler.log").open("ab") as log:
                child = subprocess.Popen(
                    [*command, str(action.job), str(attempt), str(held)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[held],
                    cwd="/",
                )
            self._children.append(child)
        finally:
            os.close(held)

    def recover(self) -> None:
        """Jobs that have lost their supervisor wait again, once none of their processes is left."""
        for row in self._store.rows(live=True):
            file = lock_file(self._store, row.id, row.attempt)
            if lock.is_held(file):
                if row.pid is not None and not _supervises(row.pid, row.id):
                    lock.end_holders(file)
                continue
            self._lost(row)

    def _lost(self, row: Row) -> None:
        now = time.time()
        store = self._store
        if row.asked == "cancel":
            store.finish(row, "cancelled", None, "", now)
        elif row.asked == "time":
            store.finish(row, "failed", None, "stopped after its time", now)
        elif row.boot is not None and row.boot != boot_id():
            store.finish(row, "waiting", None, "the machine was started anew; it starts again", now)
        elif row.losses + 1 >= MOST_LOSSES:
            said = f"its supervisor was lost {row.losses + 1} times; it may take more memory than there is"
            store.finish(row, "failed", None, said, now, lost=1)
        else:
            store.finish(row, "waiting", None, "its supervisor was lost; it starts again", now, lost=1)


def lock_file(store: Store, job: int, attempt: int) -> Path:
    """The lock of an attempt."""
    return store.job_folder(job) / f"attempt-{attempt}.lock"


def _supervises(pid: int, job: int) -> bool:
    """Whether a process is the supervisor of a job; its number may be another's by now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"supervise" in words and str(job).encode() in words
