"""The queue's file: SQLite in WAL mode. Each change is one transaction that is on the disk when it returns.

Whoever changes a job says in which attempt and state it believes it to be; where that is no longer so, nothing happens
and False comes back. So of two processes that believe to be in charge only one is.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.jobs.job import JobSpec, from_json
from shoal.jobs.local.host import Host
from shoal.jobs.local.state import Queue, Reservation, Running, Waiting

BUSY_SECONDS = 30.0
HALF_LIFE = 86400.0
"""Seconds in which what an account has used counts half."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, spec TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'waiting',
    priority INTEGER NOT NULL, account TEXT NOT NULL, submitted REAL NOT NULL, least INTEGER NOT NULL,
    most INTEGER NOT NULL, cores INTEGER NOT NULL, memory INTEGER NOT NULL, devices INTEGER NOT NULL, seconds REAL,
    preemptible INTEGER NOT NULL, reservation TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0, workers INTEGER NOT NULL DEFAULT 0, cards TEXT NOT NULL DEFAULT '',
    started REAL, ended REAL, ran REAL NOT NULL DEFAULT 0, pid INTEGER, boot TEXT,
    asked TEXT NOT NULL DEFAULT '', asked_at REAL, code INTEGER, why TEXT NOT NULL DEFAULT '',
    failures INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS by_state ON jobs (state);
CREATE TABLE IF NOT EXISTS environments (job INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS needs (job INTEGER NOT NULL, other INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_job ON needs (job);
CREATE TABLE IF NOT EXISTS shares (account TEXT PRIMARY KEY, used REAL NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS reservations (
    name TEXT PRIMARY KEY, cores INTEGER NOT NULL, memory INTEGER NOT NULL, devices INTEGER NOT NULL,
    start REAL NOT NULL, end REAL NOT NULL);
CREATE TABLE IF NOT EXISTS history (at REAL NOT NULL, job INTEGER NOT NULL, attempt INTEGER NOT NULL, what TEXT);
"""
_WAITING = (
    "id, priority, account, submitted, least, most, cores, memory, devices, seconds, preemptible, reservation"
)
_LIVE = "('running', 'stopping')"


@dataclass(frozen=True)
class Row:
    """All that is known of a job."""

    id: int
    spec: JobSpec
    state: str
    submitted: float
    attempt: int
    workers: int
    cards: tuple[int, ...]
    started: float | None
    ended: float | None
    ran: float
    """Seconds that earlier attempts have run for."""
    pid: int | None
    boot: str | None
    asked: str
    asked_at: float | None
    code: int | None
    why: str
    failures: int
    losses: int


_ROW = (
    "id, spec, state, submitted, attempt, workers, cards, started, ended, ran, pid, boot, asked, asked_at, code, why, "
    "failures, losses"
)


class Store:
    """One process's connection to the queue of a folder."""

    def __init__(self, folder: Path) -> None:
        """Opens the queue, and makes it where there is none."""
        self.folder = folder
        self._known: dict[int, Waiting] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._connection = sqlite3.connect(
                folder / "queue.sqlite", timeout=BUSY_SECONDS, isolation_level=None
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")  # what was submitted outlives a power cut
            if not self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'history'").fetchone():
                self._connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the queue in {folder} cannot be opened ({error}); name another folder by --queue, on a local disk."
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def version(self) -> int:
        """Another number whenever another process has changed something."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def job_folder(self, job: int) -> Path:
        """Where a job keeps its output and environment."""
        return self.folder / "jobs" / str(job)

    def add(self, spec: JobSpec, environment: Mapping[str, str], now: float) -> int:
        """A new job, with the environment that it will run in; its number."""
        values = (
            spec.to_json(),
            spec.priority,
            spec.account,
            now,
            spec.least,
            spec.most,
            spec.cores,
            spec.memory,
            spec.devices,
            spec.seconds,
            int(spec.preemptible),
            spec.reservation,
        )
        with self._writing() as connection:
            job = connection.execute(
                "INSERT INTO jobs (spec, priority, account, submitted, least, most, cores, memory, devices, seconds,"
                " preemptible, reservation) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            ).lastrowid
            assert job is not None
            connection.executemany(
                "INSERT INTO needs VALUES (?, ?)", [(job, int(other)) for other in spec.after]
            )
            connection.execute("INSERT INTO environments VALUES (?, ?)", (job, json.dumps(dict(environment))))
            self._note(job, 0, "submitted")
        return job

    def get(self, job: int) -> Row | None:
        """One job."""
        found = self._connection.execute(f"SELECT {_ROW} FROM jobs WHERE id = ?", (job,)).fetchone()
        return _row(found) if found else None

    def environment(self, job: int) -> dict[str, str]:
        """What a job that has not ended was submitted with."""
        found = self._connection.execute("SELECT body FROM environments WHERE job = ?", (job,)).fetchone()
        body: dict[str, str] = json.loads(found[0])
        return body

    def rows(self, live: bool = False) -> list[Row]:
        """All jobs, the oldest first; `live`: those that run."""
        where = f"WHERE state IN {_LIVE}" if live else ""
        return [
            _row(found) for found in self._connection.execute(f"SELECT {_ROW} FROM jobs {where} ORDER BY id")
        ]

    def has_work(self) -> bool:
        """Whether any job has not come to its end."""
        found = self._connection.execute(
            "SELECT 1 FROM jobs WHERE state IN ('waiting', 'running', 'stopping') LIMIT 1"
        )
        return found.fetchone() is not None

    def read(self, host: Host, now: float) -> Queue:
        """What the decision looks at."""
        connection = self._connection
        connection.execute("BEGIN")  # all of it at one moment
        try:
            waiting = self._read_waiting()
            others = {other for each in waiting for other in each.after}
            ends = {o: self._state(o) for o in others}
            running = tuple(
                _running(found)
                for found in connection.execute(
                    f"SELECT {_WAITING}, workers, started, asked, asked_at, cards FROM jobs WHERE state IN {_LIVE}"
                )
            )
            usage = {
                account: used * 0.5 ** ((now - at) / HALF_LIFE)
                for account, used, at in connection.execute("SELECT account, used, at FROM shares")
            }
            reservations = self.reservations()
        finally:
            connection.execute("COMMIT")
        return Queue(host.capacity, waiting, running, usage, reservations, ends, host.cards)

    def _read_waiting(self) -> tuple[Waiting, ...]:
        """What was asked for never changes, so that each job is read once."""
        select = self._connection.execute
        ids = [found[0] for found in select("SELECT id FROM jobs WHERE state = 'waiting'")]
        unknown = [id for id in ids if id not in self._known]
        if unknown:
            first = min(unknown)
            needs: dict[int, list[int]] = {}
            for job, other in select("SELECT job, other FROM needs WHERE job >= ?", (first,)):
                needs.setdefault(job, []).append(other)
            for found in select(f"SELECT {_WAITING} FROM jobs WHERE state = 'waiting' AND id >= ?", (first,)):
                self._known[found[0]] = _waiting(found, tuple(needs.get(found[0], ())))
        self._known = {id: self._known[id] for id in ids}
        return tuple(self._known.values())

    def _state(self, job: int) -> str:
        return str(self._connection.execute("SELECT state FROM jobs WHERE id = ?", (job,)).fetchone()[0])

    def reservations(self) -> tuple[Reservation, ...]:
        """Those that there are."""
        found = self._connection.execute("SELECT name, cores, memory, devices, start, end FROM reservations")
        return tuple(Reservation(name, (c, m, d), start, end) for name, c, m, d, start, end in found)

    def reserve(self, reservation: Reservation) -> None:
        """Set resources aside."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO reservations VALUES (?, ?, ?, ?, ?, ?)",
                (reservation.name, *reservation.amount, reservation.start, reservation.end),
            )

    def begin(self, job: int, workers: int, cards: Sequence[int], now: float) -> int | None:
        """A waiting job gets its resources: the number of the attempt, or None where it does not wait any more."""
        with self._writing() as connection:
            found = connection.execute(
                "UPDATE jobs SET state = 'running', attempt = attempt + 1, workers = ?, cards = ?, started = ?,"
                " asked = '', asked_at = NULL, pid = NULL, boot = NULL, why = '' WHERE id = ? AND state = 'waiting'"
                " RETURNING attempt",
                (workers, ",".join(map(str, cards)), now, job),
            ).fetchone()
            if found is not None:
                self._note(job, found[0], f"start {workers}")
        return None if found is None else int(found[0])

    def supervised(self, job: int, attempt: int, pid: int, boot: str) -> Row | None:
        """A supervisor takes the job over; None: it is not wanted any more."""
        changed = self._change(
            "pid = ?, boot = ?", (pid, boot), job, f"attempt = {attempt:d} AND state IN {_LIVE}"
        )
        return self.get(job) if changed else None

    def ask(self, job: int, why: str, now: float) -> bool:
        """Have a running job stop; whether it runs. A wish to cancel stands above the others."""
        rank = "asked != 'cancel'" if why == "cancel" else "asked = ''"
        return self._change(
            "state = 'stopping', asked = ?, asked_at = ?",
            (why, now),
            job,
            f"state IN {_LIVE} AND {rank}",
            why,
        )

    def drop(self, job: int, why: str, now: float, state: str = "cancelled") -> bool:
        """End a job that waits."""
        return self._change(
            "state = ?, ended = ?, why = ?", (state, now, why), job, "state = 'waiting'", state
        )

    def finish(
        self, row: Row, state: str, code: int | None, why: str, now: float, failed: int = 0, lost: int = 0
    ) -> bool:
        """An attempt has ended: what the job is now, "waiting" for one that starts again."""
        began = row.started if row.started is not None else now
        ran = max(0.0, now - began)
        used = ran * row.workers * row.spec.cores
        ended = None if state == "waiting" else now
        with self._writing() as connection:
            changed = connection.execute(
                "UPDATE jobs SET state = ?, code = ?, why = ?, ended = ?, ran = ran + ?, pid = NULL, asked = '',"
                " failures = failures + ?, losses = losses + ?"
                f" WHERE id = ? AND attempt = ? AND state IN {_LIVE} RETURNING account",
                (state, code, why, ended, ran, failed, lost, row.id, row.attempt),
            ).fetchone()
            if changed is None:
                return False
            connection.execute(
                "INSERT INTO shares VALUES (?1, ?2, ?3) ON CONFLICT (account) DO UPDATE SET"
                " used = used * pow(0.5, max(0.0, ?3 - at) / ?4) + ?2, at = ?3",
                (changed[0], used, now, HALF_LIFE),
            )
            self._note(row.id, row.attempt, f"{state} {code} {why}".strip())
            self._forget(row.id)
        return True

    def history(self) -> list[tuple[float, int, int, str]]:
        """What has happened to all jobs: when, job, attempt, what."""
        return list(self._connection.execute("SELECT at, job, attempt, what FROM history ORDER BY rowid"))

    def _change(self, what: str, values: tuple[object, ...], job: int, where: str, note: str = "") -> bool:
        with self._writing() as connection:
            found = connection.execute(
                f"UPDATE jobs SET {what} WHERE id = ? AND {where} RETURNING attempt", (*values, job)
            ).fetchone()
            if found is not None and note:
                self._note(job, found[0], note)
            self._forget(job)
        return found is not None

    def _forget(self, job: int) -> None:
        """The environment of a job that has ended: it may hold keys."""
        self._connection.execute(
            "DELETE FROM environments WHERE job IN (SELECT id FROM jobs WHERE id = ? AND ended IS NOT NULL)",
            (job,),
        )

    def _note(self, job: int, attempt: int, what: str) -> None:
        self._connection.execute("INSERT INTO history VALUES (?, ?, ?, ?)", (time.time(), job, attempt, what))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _waiting(found: Sequence[Any], after: tuple[int, ...] = ()) -> Waiting:
    """From the columns of _WAITING."""
    id, priority, account, submitted, least, most, cores, memory, devices, seconds, preemptible, name = found[
        :12
    ]
    counts = (least, most, cores, memory, devices)
    return Waiting(id, priority, account, submitted, *counts, seconds, bool(preemptible), name, after)


def _running(found: Sequence[Any]) -> Running:
    workers, started, asked, asked_at, cards = found[12:]
    return Running(_waiting(found), workers, started, asked, asked_at or 0.0, _numbers(cards))


def _row(found: Sequence[Any]) -> Row:
    """From the columns of _ROW."""
    id, spec, state, submitted, attempt, workers, cards, *rest = found
    return Row(id, from_json(spec), state, submitted, attempt, workers, _numbers(cards), *rest)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def boot_id() -> str:
    """Another text after each start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{os.uname().nodename}"
