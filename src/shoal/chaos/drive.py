"""The undisturbed run, the disturbed one, and the comparison."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.chaos.compare import Row, compare, leftovers, steps_of, strategy_of, traits_of
from shoal.chaos.job import NEVER, Command, Running
from shoal.chaos.schedule import Fault, Schedule, draw
from shoal.chaos.strike import Cut, cut_of, strike
from shoal.errors import ConfigError

POLL_SECONDS = 0.005
PATIENCE = 6.0
"""So many times as long as undisturbed a run may take, and FAULT_SECONDS more for each fault; then it hangs."""
FAULT_SECONDS = 20.0
LEAST_SECONDS = 60.0
DISK_ROOM = 64 << 20
_PR_SET_CHILD_SUBREAPER = 36
_NEW_NS = 0x00020000


@dataclass(frozen=True)
class Struck:
    """A fault that happened."""

    fault: Fault
    at_step: int
    seconds: float
    """Until all workers had begun a step after that one; -1: the run ended before."""


@dataclass
class Outcome:
    """What came of it."""

    schedule: Schedule
    rows: list[Row] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    plain_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return all(row.good for row in self.rows)

    def to_json(self) -> str:
        body = {
            "good": self.good,
            "rows": [asdict(row) for row in self.rows],
            "struck": [asdict(each) for each in self.struck],
            "plain_seconds": round(self.plain_seconds, 3),
            "seconds": round(self.seconds, 3),
            "schedule": json.loads(self.schedule.to_json()),
        }
        return json.dumps(body, indent=1)


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    command: Command
    counts: Mapping[str, int]
    seed: int
    folder: Path
    """Where the runs keep their files, and the result."""
    schedule: Schedule | None = None
    """To replay; None: draw one from the seed."""


def disturb(request: Request) -> Outcome:
    """Run undisturbed unless that is known, then disturbed; compare."""
    _check(request)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whoever loses its parent becomes ours
    plain, plain_seconds = _undisturbed(request)
    steps = len(steps_of(plain, everybody=True))
    workers = request.command.workers * request.command.hosts
    schedule = request.schedule or draw(request.seed, steps, workers, request.counts)
    if (schedule.steps, schedule.workers) != (steps, workers):
        raise ConfigError(
            f"the schedule is for {schedule.steps} steps of {schedule.workers} workers, and this run has {steps} of "
            f"{workers}; give the same --steps and --workers as then."
        )
    folder = request.folder / f"seed-{schedule.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "schedule.json").write_text(schedule.to_json())
    outcome = Outcome(schedule, plain_seconds=plain_seconds)
    kinds = {fault.kind for fault in schedule.faults}
    with _disk(folder / "checkpoints", plain / "checkpoints" if "full" in kinds else None):
        _disturbed(request.command, folder, plain, outcome)
        traits = traits_of(strategy_of(folder) or strategy_of(plain))
        outcome.rows += compare(plain, folder, traits)
    (folder / "chaos.json").write_text(outcome.to_json())
    return outcome


def _check(request: Request) -> None:
    if not Path(request.command.script).is_file():
        raise ConfigError(
            f"there is no script {request.command.script!r} in {os.getcwd()}; give a Python file."
        )
    counts = request.counts
    root = [kind for kind in ("full", "cut") if counts.get(kind)]
    if root and os.geteuid() != 0:
        raise ConfigError(
            f"--{root[0]}s: only root may make a disk or a network; leave it out, or start as root."
        )
    if counts.get("cut") and counts.get("restart"):
        raise ConfigError(
            "--cuts beside --restarts: a launcher is not started again on two hosts; one of the two."
        )
    every = request.command.checkpoint_every
    if counts.get("full") and every == NEVER:
        raise ConfigError("--fulls: nothing is written that could fail; give --checkpoint-every too.")


def _undisturbed(request: Request) -> tuple[Path, float]:
    """Its folder, and how long it took; run now, unless the same command has been."""
    command = request.command
    words = [*command.words(Path("."), 0), Path(command.script).read_text(errors="replace")]
    folder = request.folder / f"plain-{hashlib.sha256(repr(words).encode()).hexdigest()[:12]}"
    note = folder / "seconds"
    if note.is_file():
        return folder, float(note.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    with _hosts(command) as (prefixes, _):
        job = Running(command, folder, prefixes)
        job.start()
        try:
            while (code := job.code()) is None:
                time.sleep(0.02)
        finally:
            job.end()
    seconds = time.monotonic() - begun
    if code:
        raise ConfigError(f"undisturbed, the command ends with exit code {code}:\n{_tail(folder)}")
    if not steps_of(folder):
        raise ConfigError(
            f"undisturbed, {command.script} takes no step of a shoal.Run; there is nothing to disturb."
        )
    note.write_text(f"{seconds:.3f}")
    return folder, seconds


def _disturbed(command: Command, folder: Path, plain: Path, outcome: Outcome) -> None:
    begun = time.monotonic()
    faults = outcome.schedule.faults
    deadline = begun + max(LEAST_SECONDS, PATIENCE * outcome.plain_seconds) + FAULT_SECONDS * len(faults)
    with _hosts(command) as (prefixes, cut):
        job = Running(command, folder, prefixes)
        job.start()
        try:
            _strike_all(job, outcome, cut, deadline)
            while (code := job.code()) is None and time.monotonic() < deadline:
                job.look()
                time.sleep(0.02)
        finally:
            job.end()
        outcome.seconds = time.monotonic() - begun
        said = "0" if code == 0 else f"{code}\n{_tail(folder)}"
        outcome.rows.append(Row("exit code", code == 0, "it hangs" if code is None else said))
        wanted, came = len(faults), len(outcome.struck)
        over = "" if wanted == came else "; the run was over before the others"
        outcome.rows.append(Row("faults", came > 0, f"{came} of {wanted} struck{over}"))
        outcome.rows += leftovers(job.temporary, plain / "tmp", job.memory, job.pids)


def _strike_all(job: Running, outcome: Outcome, cut: Cut | None, deadline: float) -> None:
    for fault in outcome.schedule.faults:
        if not _wait_for(job.reached, fault.step, job, deadline):
            return
        step = job.reached()
        begun = time.monotonic()
        if not strike(fault, job, cut):
            return
        soon = min(deadline, begun + FAULT_SECONDS)
        back = _wait_for(job.together, step + 1, job, soon)
        outcome.struck.append(Struck(fault, step, round(time.monotonic() - begun, 3) if back else -1.0))


def _wait_for(reached: Callable[[], int], step: int, job: Running, deadline: float) -> bool:
    while reached() < step:
        if job.code() is not None or time.monotonic() > deadline:
            return False
        job.look()
        time.sleep(POLL_SECONDS)
    return True


@contextmanager
def _hosts(command: Command) -> Iterator[tuple[list[list[str]], Cut | None]]:
    """What starts the command on each host, and the cut of the second one's link."""
    if command.hosts == 1:
        yield [[]], None
        return
    from shoal.testing.hosts import INTERFACE, make_hosts

    with make_hosts(command.hosts) as hosts:
        yield [hosts.command(host) for host in range(command.hosts)], cut_of(hosts.switch, f"{INTERFACE}-1")


@contextmanager
def _disk(folder: Path, like: Path | None) -> Iterator[None]:
    """A small disk of its own for the checkpoints, if one is to be filled; seen by this process and its children."""
    folder.mkdir(exist_ok=True)
    if like is None:
        yield
        return
    size = DISK_ROOM + 3 * sum(file.stat().st_size for file in like.rglob("*") if file.is_file())
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NS):
        raise ConfigError(f"no disk can be made here: {os.strerror(ctypes.get_errno())}.")
    for words in (
        ("mount", "--make-rprivate", "/"),
        ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)),
    ):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"no disk can be made here: `{' '.join(words)}` says: {done.stderr.strip()}.")
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=False, capture_output=True)


def _tail(folder: Path, lines: int = 12) -> str:
    text = (folder / "output.txt").read_text(errors="replace")
    return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])
