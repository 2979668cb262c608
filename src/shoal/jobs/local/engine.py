"""The queue of this host.

When to use: one machine, however many people and cards. Beyond one host an engine that is there already schedules.
"""

from __future__ import annotations

import getpass
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from shoal.errors import ConfigError
from shoal.jobs.engine import ENDS, Engine, JobState
from shoal.jobs.job import PRIORITIES, JobSpec, time_text
from shoal.jobs.local import scheduler
from shoal.jobs.local.decide import can_reserve
from shoal.jobs.local.host import read_host
from shoal.jobs.local.state import Reservation
from shoal.jobs.local.store import Row, Store
from shoal.jobs.output import read_output


def default_folder() -> Path:
    """Of this user and host."""
    return Path.home() / ".shoal" / "queue" / os.uname().nodename


@dataclass(frozen=True)
class Local(Engine):
    """The queue of this host: priorities, gangs, backfill, preemption; nothing to install, nothing that listens."""

    summary = "The queue of this host; nothing to install, and nothing that listens."
    cannot: ClassVar[Mapping[str, str]] = {
        "hosts": "it is the queue of this host; for several use --on slurm or shoal run --hosts",
        "engine": "it has no options of its own",
    }

    folder: Path = field(default_factory=default_folder)
    """Where the queue is kept; on a local disk."""

    def refuse(self, spec: JobSpec) -> None:
        """More than the host has, or jobs and reservations that do not exist."""
        with closing(Store(self.folder)) as store:
            self._refuse(spec, store)

    def _refuse(self, spec: JobSpec, store: Store) -> None:
        host = read_host(self.folder)
        workers = spec.least
        window = None
        if spec.reservation:
            known = {each.name: each for each in store.reservations() if each.end > time.time()}
            window = known.get(spec.reservation)
            if window is None:
                there = ", ".join(sorted(known)) or "none"
                raise ConfigError(f"there is no reservation {spec.reservation!r}; there are: {there}.")
            if spec.seconds is None:
                raise ConfigError(
                    f"a job in the reservation {spec.reservation!r} needs --time: it ends with it."
                )
        capacity = window.amount if window else host.capacity
        where = f"the reservation {spec.reservation!r}" if window else "this host"
        for what, needs, has in (
            ("cores", workers * spec.cores, capacity[0]),
            ("bytes of memory", spec.memory, capacity[1]),
            ("devices", workers * spec.devices, capacity[2]),
        ):
            if needs > has:
                raise ConfigError(
                    f"{workers} workers need {needs} {what}, and {where} has {has}; ask for less"
                    f" (what it has is in {self.folder / 'host.json'})."
                )
        for other in spec.after:
            _row_of(store, other)

    def describe(self, spec: JobSpec) -> str:
        """The command and what is set aside for it."""
        return "\n".join(
            [
                f"in {spec.folder}: {shlex.join(spec.words(spec.most))}",
                f"takes {spec.least}:{spec.most} workers of {spec.cores} cores and {spec.devices} devices,"
                f" {spec.memory} bytes of memory, for {time_text(spec.seconds) if spec.seconds else 'any time'}",
            ]
        )

    def submit(self, spec: JobSpec) -> str:
        """One row in the queue; what runs it is started if need be."""
        with closing(Store(self.folder)) as store:
            self._refuse(spec, store)
            account = spec.account or getpass.getuser()
            job = store.add(replace(spec, account=account), os.environ, time.time())
        self._wake()
        return str(job)

    def _wake(self) -> None:
        """See that somebody schedules. Whoever asks may be the last for a while, so that one try may be too few."""
        if not scheduler.ensure(self.folder):
            time.sleep(scheduler.AGAIN_SECONDS)
            scheduler.ensure(self.folder)

    def jobs(self) -> list[JobState]:
        """All that were ever submitted."""
        with closing(Store(self.folder)) as store:
            if store.has_work():
                self._wake()
            return [_state_of(row, time.time()) for row in store.rows()]

    def logs(self, job: str, follow: bool) -> Iterator[str]:
        """The output of all its attempts."""
        with closing(Store(self.folder)) as store:
            row = _row_of(store, job)
            if follow and row.state not in ENDS:
                self._wake()

            def is_over() -> bool:
                return not follow or _row_of(store, job).state in ENDS

            yield from read_output(store.job_folder(row.id) / "log", is_over)

    def cancel(self, job: str) -> None:
        """Never begin, or save and end."""
        with closing(Store(self.folder)) as store:
            row = _row_of(store, job)
            now = time.time()
            if not store.drop(row.id, "", now) and not store.ask(row.id, "cancel", now):
                state = _row_of(store, job).state
                if state in ("done", "failed"):
                    raise ConfigError(f"job {job} is {state}; there is nothing to cancel.")
            self._wake()

    def reserve(self, reservation: Reservation) -> None:
        """Set resources aside, unless jobs or other reservations may still hold them then."""
        with closing(Store(self.folder)) as store:
            now = time.time()
            if not can_reserve(store.read(read_host(self.folder), now), reservation, now):
                raise ConfigError(
                    f"the reservation {reservation.name!r} asks for more than will be free then;"
                    " choose a later time, or less."
                )
            store.reserve(reservation)


def _row_of(store: Store, job: str) -> Row:
    row = store.get(int(job)) if job.isdigit() else None
    if row is None:
        raise ConfigError(f"there is no job {job!r} in {store.folder}; shoal jobs lists them.")
    return row


def _state_of(row: Row, now: float) -> JobState:
    names = {number: name for name, number in PRIORITIES.items()}
    runs = now - row.started if row.state in ("running", "stopping") and row.started else 0.0
    return JobState(
        str(row.id),
        row.spec.name,
        row.state,
        row.workers if row.state in ("running", "stopping") else row.spec.most,
        names.get(row.spec.priority, str(row.spec.priority)),
        row.ran + runs,
        row.why,
        row.code,
    )
