"""The user's command while it runs: how far it is, and which process is which worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shoal.report.folder import events_path
from shoal.report.follow import Follower
from shoal.world.progress_page import ProgressPage

LOOK_SECONDS = 0.25
NEVER = 1_000_000_000
"""Of `checkpoint_every`: only the last step is saved."""


@dataclass(frozen=True)
class Command:
    """`shoal run` of a script; each run of it has a folder of its own."""

    script: str
    args: tuple[str, ...]
    options: tuple[str, ...]
    """Of `shoal run`, but for those below."""
    workers: int
    """On each host."""
    checkpoint_every: int = NEVER
    full_disks: bool = False
    """Whether the disk will be full: then saves that fail do not end the run, as they would after a few in a row."""
    hosts: int = 1
    at: str = ""

    def words(self, folder: Path, host: int) -> list[str]:
        """The command, with its checkpoints, logs and temporary files in `folder`."""
        settings: tuple[str, ...] = (
            f"checkpoint={folder / 'checkpoints'}",
            f"log={folder / 'log'}",
            f"checkpoint_every={self.checkpoint_every}",
        )
        if self.full_disks:
            settings += (f"checkpoint_failures={NEVER}",)
        words = [sys.executable, "-m", "shoal", "run", "--workers", str(self.workers), *self.options]
        if self.hosts > 1:
            words += ["--hosts", str(self.hosts), "--host", str(host), "--at", self.at]
        for setting in settings:
            words += ["--set", setting]
        return [*words, self.script, *self.args]


@dataclass
class Running:
    """One run of the command."""

    command: Command
    folder: Path
    prefixes: Sequence[Sequence[str]] = ((),)
    """What runs the command on each host."""
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _pages: dict[tuple[str, int], ProgressPage] = field(default_factory=dict)
    _logs: dict[int, Follower] = field(default_factory=dict)
    _pids: dict[int, int] = field(default_factory=dict)
    _reached: int = 0
    memory: set[str] = field(default_factory=set)
    """Folders in shared memory that this job has had."""
    pids: set[int] = field(default_factory=set)
    """Processes that it has had."""
    _looked: float = 0.0

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def start(self) -> None:
        """Begin, or begin again with the same command."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        with (self.folder / "output.txt").open("ab") as output:
            self.launchers = [
                subprocess.Popen(
                    [*prefix, *self.command.words(self.folder, host)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
                for host, prefix in enumerate(self.prefixes)
            ]

    def code(self) -> int | None:
        """The exit code of the whole: None while one runs, the first bad one else."""
        codes = [launcher.poll() for launcher in self.launchers]
        bad = [code for code in codes if code]
        return None if None in codes and not bad else (bad[0] if bad else 0)

    def reached(self) -> int:
        """The last step that any worker has ever begun."""
        self._reached = max([self._reached, *(page.read().step for page in self._by_rank().values())])
        return self._reached

    def together(self) -> int:
        """The last step that all present workers have begun."""
        steps = [page.read().step for page in self._by_rank().values()]
        return min(steps, default=0) if len(steps) == self.command.workers * self.command.hosts else 0

    def _by_rank(self) -> dict[int, ProgressPage]:
        """The newest page of each worker: the launcher makes new ones for each start."""
        found: dict[int, tuple[int, ProgressPage]] = {}
        for path in self.temporary.glob("shoal-*/**/progress-*"):
            with suppress(OSError, ValueError):  # it is being made, or gone
                facts = path.stat()
                known = self._pages.get((str(path), facts.st_ino))
                if known is None:
                    known = self._pages[str(path), facts.st_ino] = ProgressPage(str(path))
                rank = int(path.name.removeprefix("progress-"))
                if rank not in found or facts.st_ctime_ns > found[rank][0]:
                    found[rank] = (facts.st_ctime_ns, known)
        return {rank: page for rank, (_, page) in found.items()}

    def look(self) -> None:
        """Note which processes and folders there are, now and again: some are gone when one could ask."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                words = process.cmdline()
                self.pids.add(process.pid)
                if "shoal-remove" in words and words[-1].startswith("/dev/shm/"):
                    self.memory.add(words[-1])

    def pid(self, rank: int) -> int | None:
        """The process of a worker, from the first line of its log; None while it has none."""
        log = self._logs.setdefault(rank, Follower(events_path(self.folder / "log", rank)))
        for event in log.poll():
            if event.get("event") == "start" and isinstance(event.get("pid"), int):
                self._pids[rank] = int(str(event["pid"]))
        pid = self._pids.get(rank)
        if pid is None:
            return None
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            ours = {launcher.pid for launcher in self.launchers}
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and ours & {each.pid for each in process.parents()}:
                return pid
        return None

    def kill_launchers(self) -> None:
        """As `kill -9` of `shoal run`."""
        for launcher in self.launchers:
            launcher.send_signal(signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()

    def end(self) -> None:
        """End what is still there, after a hang or a bad end."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.terminate()
        deadline = time.monotonic() + 10
        for launcher in self.launchers:
            try:
                launcher.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
