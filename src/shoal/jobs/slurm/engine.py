"""A Slurm cluster, through its own commands.

When to use: where there is one. It schedules; Shoal writes the script, and meets on the nodes that it gives.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shoal.errors import ConfigError
from shoal.jobs.engine import ENDS, ArrayEngine, JobState
from shoal.jobs.job import JobSpec
from shoal.jobs.output import read_output
from shoal.jobs.slurm.script import batch_script

_STATES = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SUSPENDED": "waiting",
    "PREEMPTED": "waiting",
    "CONFIGURING": "running",
    "RUNNING": "running",
    "COMPLETING": "stopping",
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
}
_ID = re.compile(r"\d+(_\d+)?$")
_SECONDS = 60.0
"""So long a command of Slurm may take."""


@dataclass(frozen=True)
class Slurm(ArrayEngine):
    """A Slurm cluster: one batch script a job, one launcher a node."""

    summary = (
        "A Slurm cluster, by a batch script that you can read; requeued jobs go on from their checkpoints."
    )
    cannot: ClassVar[Mapping[str, str]] = {
        "preemptible": "which jobs make way is for the cluster's partitions to say (--engine partition=NAME)",
    }

    def refuse(self, spec: JobSpec) -> None:
        """What Slurm itself refuses, asked by `sbatch --test-only`; without Slurm there is nobody to ask."""
        for option in spec.engine:
            if not re.match(r"[a-z][a-z-]*(=|$)", option) or "\n" in option:
                raise ConfigError(f"--engine {option} is no option of sbatch; write it like partition=debug.")
        if "\n" in spec.folder or '"' in spec.folder:
            raise ConfigError(
                f"the folder {spec.folder!r} cannot be written into a batch script; use another."
            )
        if shutil.which("sbatch") is not None:
            for other in spec.after:
                _fact(
                    other, "JobState"
                )  # sbatch takes a job that it does not know for one that has ended well
            done = _run(["sbatch", "--test-only"], batch_script([spec]))
            if done.returncode:
                raise ConfigError(f"Slurm refuses the job: {_said(done)}.")

    def describe(self, spec: JobSpec) -> str:
        """The batch script."""
        return batch_script([spec]).rstrip()

    def submit(self, spec: JobSpec) -> str:
        """The number that Slurm gives it."""
        return self._sbatch([spec], 0)

    def submit_all(self, specs: Sequence[JobSpec], at_once: int) -> list[str]:
        """An array, of which `at_once` run at a time."""
        if len(specs) == 1:
            return [self.submit(specs[0])]
        number = self._sbatch(specs, at_once)
        return [f"{number}_{place}" for place in range(len(specs))]

    def _sbatch(self, specs: Sequence[JobSpec], at_once: int) -> str:
        _need("sbatch")
        done = _run(["sbatch", "--parsable"], batch_script(specs, at_once))
        if done.returncode:
            raise ConfigError(f"Slurm refuses the job: {_said(done)}.")
        return done.stdout.strip().partition(";")[0]

    def jobs(self) -> list[JobState]:
        """Those of this user that Shoal has submitted; Slurm forgets what has ended after some minutes."""
        _need("squeue")
        shown = "%i|%j|%T|%k|%Q|%M|%r"
        done = _run(
            ["squeue", "--me", "--states=all", "--array", "--noheader", "--sort=i", f"--format={shown}"]
        )
        if done.returncode:
            raise ConfigError(f"Slurm does not answer: {_said(done)}.")
        rows = [line.split("|") for line in done.stdout.splitlines()]
        return [_state_of(*row) for row in rows if len(row) == 7 and row[3].startswith("shoal:")]

    def logs(self, job: str, follow: bool) -> Iterator[str]:
        """The file that the script names; the file system must be shared with the nodes."""
        file = Path(_fact(job, "StdOut"))

        def is_over() -> bool:
            return not follow or next((one.state in ENDS for one in self.jobs() if one.id == job), True)

        yield from read_output(file, is_over)

    def cancel(self, job: str) -> None:
        """SIGTERM, so that it saves."""
        _fact(job, "JobState")
        done = _run(["scancel", job])
        if done.returncode:
            raise ConfigError(f"Slurm does not cancel job {job}: {_said(done)}.")


def _state_of(id: str, name: str, state: str, comment: str, priority: str, ran: str, why: str) -> JobState:
    workers = comment.removeprefix("shoal:")
    known = _STATES.get(state, "failed")
    said = "" if why in ("None", "") else why
    count = int(workers) if workers.isdigit() else 0
    return JobState(
        id, name, known, count, priority, _seconds(ran), f"{state.lower()}: {said}" if said else ""
    )


def _seconds(text: str) -> float:
    """Seconds, from Slurm's [days-][[hours:]minutes:]seconds.

    >>> _seconds("1-02:00:01"), _seconds("0:07"), _seconds("INVALID")
    (93601.0, 7.0, 0.0)
    """
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")):
        return 0.0
    total = 0.0
    for part in parts:
        total = total * 60 + int(part)
    return total + 86400.0 * int(days or 0)


def _fact(job: str, name: str) -> str:
    """What `scontrol show job` says of a job under a name."""
    _need("scontrol")
    done = _run(["scontrol", "show", "job", job]) if _ID.match(job) else None
    found = re.search(rf"\b{name}=(\S*)", done.stdout) if done is not None else None
    if found is None:
        raise ConfigError(f"Slurm knows no job {job!r} any more; shoal jobs --on slurm lists them.")
    return found[1]


def _need(program: str) -> None:
    if shutil.which(program) is None:
        raise ConfigError(f"there is no {program} here; submit from a host of the Slurm cluster.")


def _run(words: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, input=text, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{words[0]} has not answered for {_SECONDS:g} s; is the cluster's controller up?"
        ) from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    return re.sub(r"^\w+: (error|fatal): ", "", last).rstrip(".")
