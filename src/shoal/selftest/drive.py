"""Start the workers of a self-test, again where a check has ended them, until every check has a row."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.local import Job, check
from shoal.cluster.recovery.supervise import run_job
from shoal.errors import ConfigError, WorkerFailed
from shoal.selftest.inbox import Inbox, Wanted
from shoal.selftest.kinds import KINDS, LOST_WORKER, TOGETHER
from shoal.selftest.lost_worker import LostWorker, subjects
from shoal.selftest.row import Row

SCRIPT = str(Path(__file__).with_name("worker.py"))
STARTING = "starting"
MANY = 8
"""Workers where there are as many cards or more, unless another number is asked for."""


@dataclass(frozen=True)
class Request:
    """What to test, and with whom."""

    device: str = "auto"
    workers: int | None = None
    """None: as many as there are cards, or two on CPUs."""
    hosts: int = 1
    host: int = 0
    at: str = ""
    kinds: tuple[str, ...] = KINDS


@dataclass(frozen=True)
class Found:
    """What a self-test has found out."""

    machine: dict[str, str]
    workers: int
    """On all hosts."""
    rows: list[Row]


def examine(request: Request, folder: Path, default_workers: int) -> Found:
    """Make every check. Files go into `folder`, which is empty; progress goes to stderr."""
    inbox = Inbox(folder)
    _check_kinds(request.kinds)
    inbox.ask(Wanted(request.device, ()))
    first = Job(SCRIPT, (str(folder),), output="none")
    check(first)
    run_job(first)
    cards = inbox.machine()["cards"]
    workers = request.workers or _fitting(request.device, cards, default_workers)
    job = Job(
        SCRIPT,
        (str(folder),),
        workers,
        output="first",
        hosts=request.hosts,
        host=request.host,
        at=request.at,
    )
    check(job)
    print(f"cards: {cards}; {job.size} workers", file=sys.stderr, flush=True)
    together = tuple(kind for kind in TOGETHER if kind in request.kinds)
    if together:
        _make(job, inbox, Wanted(request.device, together))
    if LOST_WORKER in request.kinds:
        for row in _lose_workers(request, folder, workers):
            inbox.add(row)
            print(f"{row.key}: {row.verdict}, {row.seconds:.1f} s", file=sys.stderr, flush=True)
    return Found(inbox.machine(), job.size, inbox.rows())


def _make(job: Job, inbox: Inbox, wanted: Wanted) -> None:
    """All checks of workers that stay together, but for those that end them: others go on with the next."""
    while True:
        inbox.ask(Wanted(wanted.device, wanted.kinds, [row.key for row in inbox.rows()]))
        try:
            run_job(job)
            return
        except WorkerFailed as failed:
            begun = inbox.begun()
            if begun is None:
                if failed.refusal:
                    raise ConfigError(str(failed)) from None
                inbox.add(Row(STARTING, f"{job.size} workers", "failed", str(failed)))
                return
            inbox.add(Row(*begun, "failed", str(failed)))
            print(f"{begun[0]}: {begun[1]}: failed; other workers go on", file=sys.stderr, flush=True)
            if job.hosts > 1:  # the other hosts do not know with what to go on
                inbox.add(
                    Row(STARTING, "all checks after it", "left out", "several hosts cannot start again.")
                )
                return


def _lose_workers(request: Request, folder: Path, workers: int) -> list[Row]:
    if request.hosts > 1:
        why = "started on one host only; run `shoal selftest` without --hosts on one of them."
        return [Row(LOST_WORKER, subject, "left out", why) for subject in subjects()]
    check = LostWorker(folder / "lost", request.device, workers)
    return [check.check(subject) for subject in subjects()]


def _check_kinds(kinds: tuple[str, ...]) -> None:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: it is one of {', '.join(KINDS)}.")


def _fitting(device: str, cards: str, default_workers: int) -> int:
    """As many workers as there are cards; else as `shoal run` would start.

    >>> _fitting("auto", "4 × H100, 4 × A100", 2), _fitting("cpu", "4 × H100", 2), _fitting("auto", "none", 2)
    (8, 2, 2)
    """
    if device == "cpu" or cards == "none":
        return default_workers
    return min(MANY, sum(int(part.split(" × ")[0]) for part in cards.split(", ")))
