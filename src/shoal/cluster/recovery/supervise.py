"""A job from its first start to its end: where a worker is lost, all are started again and go on from what is kept.

Workers keep snapshots in a folder of this host's memory that is private to the job: it outlives them, and is gone with
the launcher, however that ends. Checkpoints of the user's own are newer at times, and are taken then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from shoal.cluster.local import Attempt, Job, address_of, check, import_torch, threads_of
from shoal.cluster.recovery.elastic import Size
from shoal.cluster.recovery.liaison import Liaison
from shoal.cluster.recovery.patience import Patience, holds_snapshot
from shoal.cluster.recovery.retries import Retries, Verdict
from shoal.cluster.stage_processes import StageProcesses
from shoal.cluster.watch import Interrupts, say
from shoal.errors import ConfigError, WorkerFailed
from shoal.world.launch import Again
from shoal.world.private_folder import private_folder
from shoal.world.progress_page import Phase

MEMORY = "/dev/shm"


def run_job(job: Job) -> None:
    """Run `job` to its end on this host.

    Raises ConfigError before anything starts, and WorkerFailed with the first cause and its exit code, where the
    workers are not started again. Ctrl-C ends them and raises KeyboardInterrupt; SIGTERM and SIGHUP end them and raise
    SystemExit.
    """
    check(job)
    forkable = not job.fresh and import_torch(job)
    if job.hosts > 1 and not forkable:  # nothing can be forked that would talk to the other hosts
        job = replace(job, retries=0)
    with private_folder() as private, _memory(job) as (memory, descriptor), Interrupts() as interrupts:
        stages = StageProcesses(job, private.path, interrupts)
        kept = [private.descriptor, *descriptor]
        starts = _Starts(job, private.path, kept, memory, interrupts, forkable, stages)
        try:
            while starts.run():
                interrupts.obey()
            stages.finish()
            interrupts.obey()
        finally:
            starts.close()
            stages.close()


class _Starts:
    """One start after the other, until the job has come to its end."""

    def __init__(
        self,
        job: Job,
        folder: str,
        kept: Sequence[int],
        memory: str,
        interrupts: Interrupts,
        forkable: bool,
        stages: StageProcesses,
    ) -> None:
        self._job = job
        self._folder = folder
        self._kept = kept
        self._stages = stages
        self._environment = {**({"SHOAL_MEMORY": memory} if memory else {}), **stages.environment()}
        self._interrupts = interrupts
        self._forkable = forkable
        self._retries = Retries(job.retries)
        self._patience = Patience(job.hang_limit, lambda: holds_snapshot(memory))
        self._size = Size(job.workers, job.least or job.workers, job.workers)
        self._liaison: Liaison | None = None
        if job.hosts > 1 and job.retries:
            closes = [*kept, *interrupts.descriptors]
            self._liaison = Liaison(job.host, job.hosts, address_of(job.at), closes)
            self._environment["SHOAL_KEPT"] = "1"
        self._number = 0
        self._log = ""
        """Where the run keeps its event logs, once that is known."""
        self._failed = 0.0
        self._verdict = Verdict(again=False)

    def run(self) -> bool:
        """One start; whether there has to be another."""
        folder = os.path.join(self._folder, f"start-{self._number}") if self._number else self._folder
        os.makedirs(folder, exist_ok=True)
        job = replace(self._job, workers=self._size.now)
        if self._liaison is not None:
            number = self._liaison.begin(self._interrupts)
            self._environment["TORCHELASTIC_RESTART_COUNT"] = str(number)
        attempt = Attempt(
            job,
            folder,
            self._interrupts,
            threads_of(job),
            self._forkable,
            self._kept,
            self._environment,
            self._liaison,
            self._stages,
            self._patience.limit,
        )
        self._number += 1
        self._verdict = Verdict(again=False)
        try:
            if not attempt.run(self._decide, self._size.grows_in):
                if self._liaison is not None:
                    self._liaison.end()
                return False
            self._tell_growth()
        except WorkerFailed as failed:
            if not self._verdict.again:
                if self._liaison is not None:
                    self._liaison.end(str(failed).partition("\n")[0])
                self._note_loss(failed)
                raise _with(failed, self._verdict.why) from None
            self._tell_loss(failed, job.workers)
            if self._liaison is not None:
                self._liaison.again()
            self._interrupts.pause(self._verdict.pause)
        return True

    def close(self) -> None:
        """The job is over, however that came."""
        if self._liaison is not None:
            self._liaison.close()

    def _decide(self, failed: WorkerFailed, reached: int) -> bool:
        """Whether there is another start; asked while the workers of this one are still there."""
        self._failed = time.monotonic()
        known = self._patience.knows(failed.loss)
        self._patience.after(failed.loss)
        self._verdict = self._retries.after(failed, reached, self._size, known)
        return self._verdict.again

    def _tell_loss(self, failed: WorkerFailed, before: int) -> None:
        """Say what has happened to the user, to the event log, and to the workers of the next start."""
        loss, now = failed.loss, self._size.now
        assert loss is not None
        pause = f" in {self._verdict.pause:g} s" if self._verdict.pause else ""
        then = f"all workers start again{pause}."
        if self._verdict.shrinks:
            then = f"worker {loss.rank} was lost twice in a row: {now} workers go on, and {before} after a minute."
        say(f"{loss.sentence}\nshoal: {then}")
        first = self._note_loss(failed)
        if self._verdict.shrinks:
            self._note(
                "resize", {"before": before, "workers": now, "why": "a worker was lost twice in a row"}
            )
        self._go_on(Again(self._retries.times, self._failed, first, loss.rank, loss.step))

    def _note_loss(self, failed: WorkerFailed) -> str:
        """Write down who was lost; the sentence."""
        loss = failed.loss
        if loss is None:
            return ""
        first = loss.sentence.partition("\n")[0].rstrip(":")
        facts = {
            "why": first,
            "rank": loss.rank if loss.rank >= 0 else None,
            "pid": loss.pid,
            "phase": loss.phase,
        }
        done = loss.step - Phase[loss.phase.upper()].in_step if loss.phase else loss.step
        self._log = loss.log
        self._note("failure", {**facts, "after": max(0, done), "exit_code": failed.exit_code})
        return first

    def _tell_growth(self) -> None:
        before = self._size.now
        self._size.grow()
        said = f"{self._size.now} workers go on, in place of {before}"
        say(f"{said}.")
        self._note("resize", {"before": before, "workers": self._size.now, "why": "places are tried again"})
        self._go_on(Again(self._retries.times, time.monotonic(), said, grown=True))

    def _go_on(self, again: Again) -> None:
        self._environment = {**self._environment, "SHOAL_AGAIN": json.dumps(asdict(again))}

    def _note(self, event: str, facts: Mapping[str, object]) -> None:
        """Write into the launcher's event log, beside those of the run."""
        # With numpy, whose threads the launcher must not have before it forks.
        from shoal.report.events import EventLog
        from shoal.report.folder import events_path

        if not self._log:
            return
        with suppress(OSError, ConfigError), EventLog(events_path(Path(self._log), "launcher")) as log:
            log.note(event, facts)


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
