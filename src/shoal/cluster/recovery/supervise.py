"""A job from its first start to its end: where a worker is lost, all are started again and go on from what is kept.

Workers keep snapshots in a folder of this host's memory that is private to the job: it outlives them, and is gone with
the launcher, however that ends. Checkpoints of the user's own are newer at times, and are taken then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from shoal.cluster.local import Attempt, Job, check, import_torch, threads_of
from shoal.cluster.recovery.retries import Retries, Verdict
from shoal.cluster.watch import Interrupts, say
from shoal.errors import ConfigError, Loss, WorkerFailed
from shoal.world.launch import Again
from shoal.world.private_folder import private_folder

MEMORY = "/dev/shm"


def run_job(job: Job) -> None:
    """Run `job` to its end on this host.

    Raises ConfigError before anything starts, and WorkerFailed with the first cause and its exit code, where the
    workers are not started again. Ctrl-C ends them and raises KeyboardInterrupt; SIGTERM and SIGHUP end them and raise
    SystemExit.
    """
    check(job)
    if job.hosts > 1:  # the launchers of several hosts do not agree on a start
        job = replace(job, retries=0)
    threads = threads_of(job)
    forkable = not job.fresh and import_torch(job)
    with private_folder() as private, _memory(job) as (memory, descriptor), Interrupts() as interrupts:
        retries = Retries(job.retries)
        environment = {"SHOAL_MEMORY": memory} if memory else {}
        kept = [private.descriptor, *descriptor]
        folder = private.path
        while True:
            attempt = Attempt(job, folder, interrupts, threads, forkable, kept, environment)
            decision = _Decision(retries)
            try:
                attempt.run(decision)
                return
            except WorkerFailed as failed:
                if not decision.verdict.again:
                    raise _with(failed, decision.verdict.why) from None
                again = decision.tell(failed)
            interrupts.pause(decision.verdict.pause)
            interrupts.obey()
            folder = os.path.join(private.path, f"start-{retries.times}")
            os.mkdir(folder)
            environment = {**environment, "SHOAL_AGAIN": json.dumps(asdict(again))}


class _Decision:
    """Whether there is another start; made while the workers of this one are still there."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._failed = 0.0
        self.verdict = Verdict(again=False)

    def __call__(self, failed: WorkerFailed, reached: int) -> bool:
        self._failed = time.monotonic()
        self.verdict = self._retries.after(failed, reached)
        return self.verdict.again

    def tell(self, failed: WorkerFailed) -> Again:
        """Say what has happened to the user, and what of it the workers of the next start shall know."""
        loss = failed.loss
        assert loss is not None
        pause = f" in {self.verdict.pause:g} s" if self.verdict.pause else ""
        say(f"{loss.sentence}\nshoal: all workers start again{pause}.")
        first = loss.sentence.partition("\n")[0].rstrip(":")
        _note(loss, failed.exit_code, first)
        return Again(self._retries.times, self._failed, first, loss.rank, loss.step)


def _note(loss: Loss, code: int, why: str) -> None:
    """Write the loss into the launcher's event log, beside those of the run."""
    # With numpy, whose threads the launcher must not have before it forks.
    from shoal.report.events import EventLog
    from shoal.report.folder import events_path

    if not loss.log:
        return
    facts = {
        "why": why,
        "rank": loss.rank,
        "pid": loss.pid,
        "after": max(0, loss.step - 1),
        "phase": loss.phase,
    }
    with suppress(OSError, ConfigError), EventLog(events_path(Path(loss.log), "launcher")) as log:
        log.note("failure", {**facts, "exit_code": code})


def _with(failed: WorkerFailed, why: str) -> WorkerFailed:
    if not why:
        return failed
    return WorkerFailed(f"{failed}\nshoal: {why}", failed.exit_code, failed.refusal, failed.loss)


@contextmanager
def _memory(job: Job) -> Iterator[tuple[str, list[int]]]:
    """A folder in this host's memory, and the descriptor that keeps it; no folder where there cannot be one."""
    if not job.retries or not os.access(MEMORY, os.W_OK) or not sys.platform.startswith("linux"):
        yield "", []
        return
    with private_folder("shoal-memory-", MEMORY) as folder:
        yield folder.path, [folder.descriptor]
