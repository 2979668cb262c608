"""What each kind of fault does. One function a kind; the table says which."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.chaos.job import Running
from shoal.chaos.schedule import Fault

PULSE_SECONDS = 0.03
WORKER_SECONDS = 20.0
"""A worker that was just lost is waited for so long."""
Cut = Callable[[bool], None]


def strike(fault: Fault, job: Running, cut: Cut | None = None) -> bool:
    """Do it; whether there was anything to strike. `cut`: puts the link between the hosts down, and up again."""
    if fault.kind == "restart":
        job.kill_launchers()
        job.start()
        return True
    if fault.kind == "full":
        # Two saves fail, and no more: one that is not over at the end of a short run would be no fault of the run's.
        limit = job.reached() + 2 * job.command.checkpoint_every
        _fill(job.folder / "checkpoints", fault.seconds, lambda: job.reached() >= limit)
        return True
    if fault.kind == "cut":
        assert cut is not None
        cut(True)
        time.sleep(fault.seconds)
        cut(False)
        return True
    pid = _wait_for(job, fault.rank)
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        WORKERS[fault.kind](pid, fault.seconds)
    return True


def _wait_for(job: Running, rank: int) -> int | None:
    deadline = time.monotonic() + WORKER_SECONDS
    while time.monotonic() < deadline and job.code() is None:
        pid = job.pid(rank)
        if pid is not None:
            return pid
        time.sleep(0.01)
    return None


def _kill(pid: int, _seconds: float) -> None:
    os.kill(pid, signal.SIGKILL)


def _stop(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def _delay(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        _stop(pid, PULSE_SECONDS)
        time.sleep(PULSE_SECONDS)


def _fill(folder: Path, seconds: float, enough: Callable[[], bool]) -> None:
    """Take what is left of a disk, for a while or until it is enough."""
    filler = folder / ".filler"
    try:
        with filler.open("wb") as file, suppress(OSError):
            while True:
                facts = os.statvfs(folder)
                free = facts.f_bavail * facts.f_frsize
                if free < 1 << 12:
                    break
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
                file.seek(0, os.SEEK_END)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not enough():
            time.sleep(0.005)
    finally:
        filler.unlink(missing_ok=True)


def cut_of(switch: str, port: str) -> Cut:
    """The cut of a link of `shoal.testing.hosts`: the switch's end of it goes down, as if the cable was pulled."""

    def cut(down: bool) -> None:
        words = ("ip", "-n", switch, "link", "set", port, "down" if down else "up")
        subprocess.run(words, check=True, capture_output=True)

    return cut


WORKERS = {"kill": _kill, "stop": _stop, "delay": _delay}
"""Faults of one worker, given its process."""
