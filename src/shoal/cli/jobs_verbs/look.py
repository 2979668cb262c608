"""`shoal jobs`, `shoal logs` and `shoal cancel`: what is in the queue, what it prints, and ending it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.jobs_verbs.submit import On, QueueFolder, engine_of
from shoal.cli.status import plain
from shoal.cli.text_columns import columns

if TYPE_CHECKING:
    from shoal.jobs.engine import JobState

Job = Annotated[
    str, typer.Argument(help="Its number, or slurm:17 for one of another engine.", show_default=False)
]


def jobs(
    everything: Annotated[bool, typer.Option("--all", help="Those that have ended too.")] = False,
    on: On = "local",
    queue: QueueFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a job, one a line.")] = False,
) -> None:
    """Show the jobs of a queue: those that run and wait, and the last ten that have ended.

    \b
    shoal jobs
    shoal jobs --on slurm --all
    """
    from shoal.jobs.engine import ENDS

    found = engine_of(on, queue).jobs()
    ended = [job for job in found if job.state in ENDS]
    hidden = {job.id for job in ended[:-10]} if not everything else set()
    shown = [job for job in found if job.id not in hidden]
    if as_json:
        for job in shown:
            print(json.dumps(asdict(job)))
        return
    if not shown:
        print("no jobs; shoal submit train.py puts one into the queue.")
        return
    head = ["job", "name", "state", "workers", "priority", "ran", ""]
    print(columns([head, *(_cells(job) for job in shown)], right=[0, 3, 5]))
    if hidden:
        print(f"and {len(hidden)} that ended earlier: shoal jobs --all")


def _cells(job: JobState) -> list[str]:
    from shoal.jobs.job import time_text

    state = job.state if not job.code else f"{job.state} ({job.code})"
    ran = time_text(job.seconds) if job.seconds else ""
    return [job.id, plain(job.name, 24), state, str(job.workers), job.priority, ran, plain(job.why)]


def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until it has ended.")] = False,
    on: On = "local",
    queue: QueueFolder = None,
) -> None:
    """Show the output of a job, of all its starts.

    \b
    shoal logs 12 -f
    """
    name, number = split(job, on)
    for piece in engine_of(name, queue).logs(number, follow):
        sys.stdout.write(piece)
        sys.stdout.flush()


def cancel(
    names: Annotated[
        list[str], typer.Argument(metavar="JOB...", help="Their numbers, or slurm:17.", show_default=False)
    ],
    on: On = "local",
    queue: QueueFolder = None,
) -> None:
    """End jobs: those that run save first, those that wait never start.

    \b
    shoal cancel 12 13
    """
    for job in names:
        name, number = split(job, on)
        engine_of(name, queue).cancel(number)
        print(f"job {job} is cancelled.")


def split(job: str, on: str) -> tuple[str, str]:
    """Engine and number of a job as people name it.

    >>> split("12", "local"), split("slurm:17", "local")
    (('local', '12'), ('slurm', '17'))
    """
    name, colon, number = job.partition(":")
    return (name, number) if colon else (on, job)
