"""The supervisor of one attempt of a job: starts `shoal run`, passes on the wish to stop, and notes how it ended.

Its end is the end of the job's processes: the kernel kills the launcher with it, and the launcher's workers with that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from shoal.cluster.watch import FINISH_SECONDS
from shoal.cluster.worker import die_with
from shoal.jobs.job import time_text
from shoal.jobs.local import lock, scheduler
from shoal.jobs.local.state import TIME_GRACE
from shoal.jobs.local.store import Row, Store, boot_id

POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
SAVE_SECONDS = FINISH_SECONDS + 30.0
"""How long a job may take to save when it has to make way or is cancelled."""
REFUSED = 2
"""The exit code of what cannot work: another start would end in the same way."""


class Supervisor:
    """One attempt."""

    def __init__(self, store: Store, row: Row, held: int) -> None:
        self._store = store
        self._row = row
        self._held = held
        self._ending = False

    def end(self, _number: int, _frame: FrameType | None) -> None:
        """The machine goes down, or somebody wants this process to end: the job saves, and waits for its next start."""
        self._ending = True

    def run(self) -> None:
        """From the start of `shoal run` to the note of its end."""
        row, store = self._row, self._store
        with (store.job_folder(row.id) / "log").open("ab") as log:
            try:
                child = self._start(log.fileno())
            except OSError as error:
                said = f"it cannot be started ({error.strerror}: {error.filename})"
                store.finish(row, "failed", None, said, time.time(), failed=1)
                return
            code = self._watch(child)
        lock.end_holders(scheduler.lock_file(store, row.id, row.attempt))
        asked = (store.get(row.id) or row).asked
        state, why, failed = outcome(row, asked, code)
        store.finish(row, state, code, why, time.time(), failed=failed)

    def _start(self, log: int) -> subprocess.Popen[bytes]:
        row = self._row
        environment = self._store.environment(row.id) | {
            "SHOAL_JOB": str(row.id),
            "OMP_NUM_THREADS": str(row.spec.cores),
        }
        if row.cards or row.spec.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, row.cards))
        mine = os.getpid()
        return subprocess.Popen(
            row.spec.words(row.workers),
            cwd=row.spec.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[self._held],
            preexec_fn=lambda: die_with(mine),
        )

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        version, looked = -1, 0.0
        asked_at: float | None = None
        asked = ""
        while (code := child.poll()) is None:
            if self._ending:
                self._ending = False
                self._store.ask(self._row.id, "preempt", time.time())
                version = -1
            newest = self._store.version()
            if newest != version:
                version = newest
                row = self._store.get(self._row.id)
                if row is None or row.attempt != self._row.attempt:
                    child.kill()
                elif row.asked != asked:
                    asked = row.asked
                    asked_at = asked_at or time.monotonic()
                    child.send_signal(signal.SIGTERM)
            grace = TIME_GRACE if asked == "time" else SAVE_SECONDS
            if asked_at is not None and time.monotonic() - asked_at > grace:
                child.kill()
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                scheduler.ensure(self._store.folder)
            try:
                code = child.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return code
        return code


def outcome(row: Row, asked: str, code: int) -> tuple[str, str, int]:
    """What a job is after an attempt: its state, why, and by how many its failures grow.

    A job that made way waits again whatever its exit code, unless it was done just then.
    """
    if code == 0:
        return "done", "", 0
    if asked == "cancel":
        return "cancelled", "", 0
    if asked == "preempt":
        return "waiting", "it was stopped to make way; it starts again", 0
    if asked == "time":
        limit = row.spec.seconds or 0.0
        return "failed", f"stopped after its time of {time_text(limit)}; submit it again to go on", 0
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    if code != REFUSED and row.failures < row.spec.retries:
        return "waiting", f"it ended with {ended}; start {row.failures + 2} of {row.spec.retries + 1}", 1
    return "failed", f"it ended with {ended}; see its output: shoal logs {row.id}", 1


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A supervisor is asked through the store, not by signals of a terminal."""


def main(folder: Path, job: int, attempt: int, held: int) -> None:
    """Supervise one attempt, if the store still wants it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ignore)
    store = Store(folder)
    row = store.supervised(job, attempt, os.getpid(), boot_id())
    if row is not None:
        supervisor = Supervisor(store, row, held)
        signal.signal(signal.SIGTERM, supervisor.end)
        supervisor.run()
        scheduler.ensure(folder)
