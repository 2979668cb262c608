"""How long a job stands still after `kill -9` of a server or of the coordinator.

    scripts/bench server pause

`shoal run` trains a model with two workers and three servers: a small one, one step every 20 ms or so; one with rows of
a `SparseEmbedding`; and one of 20 M parameters, of which a new server gets some 200 MB with Adam. Now and then
the head of the ledger's chain is killed, its tail, or the coordinator. A pause is the longest time between two steps
after a kill, less that of a usual step. The next kill comes when all copies are whole again. Goal: at most a second.
The training script is pause_job.py.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.server import pause_job
from benchmarks.workload.children import environment

VICTIMS = ("head", "tail", "coordinator")
GOAL = 1.0
"""Seconds, for the longest pause of all."""
QUIET = 1.5
"""Seconds to look at after a kill."""


def listener(launcher: psutil.Process, address: str) -> int:
    """The process behind an address."""
    port = int(address.rpartition(":")[2])
    for child in launcher.children():
        if child.name().startswith("shoal-") and any(
            c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in child.net_connections("tcp")
        ):
            return int(child.pid)
    raise ProcessLookupError(f"nobody listens at {address}")


def wait_until_whole(folder: Path, since: float) -> dict[str, object]:
    """Until all copies are whole, by what was said after a moment."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.05)
        status = folder / "status"
        if status.exists() and status.stat().st_mtime > since:
            told: dict[str, object] = json.loads(status.read_text())
            if told["whole"] and told["of"] == told["epoch"]:
                return told
    raise TimeoutError("the servers did not become whole within 60 s")


def kill_one(launcher: psutil.Process, victim: str, told: dict[str, object]) -> float:
    """When it was killed."""
    if victim == "coordinator":
        pid = next(c.pid for c in launcher.children() if c.name().startswith("shoal-coord"))
    else:
        chain = told["chain"]
        assert isinstance(chain, list)
        pid = listener(launcher, chain[0 if victim == "head" else -1])
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def times(folder: Path) -> list[float]:
    """When each step was over for the first worker."""
    lines = (folder / "steps-0").read_text().splitlines()
    return [float(line.split()[1]) for line in lines if len(line.split()) == 2]


def measure(turns: int) -> Iterator[Section]:
    """A table for each model."""
    for kind in pause_job.MODELS:
        yield measure_one(kind, turns)


def measure_one(kind: str, turns: int) -> Section:
    """Kill one after the other."""
    kills: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "shoal", "run", "--workers", "2", "--strategy", "ps(servers=3)"]
        process = subprocess.Popen([*command, pause_job.__file__, name, kind], env=environment())
        try:
            launcher = psutil.Process(process.pid)
            told = wait_until_whole(folder, 0.0)
            time.sleep(QUIET)
            for turn in range(turns * len(VICTIMS)):
                victim = VICTIMS[turn % len(VICTIMS)]
                before = time.time()
                kills.append((victim, kill_one(launcher, victim, told)))
                time.sleep(QUIET)
                told = wait_until_whole(folder, before + QUIET)
            return section_of(kind, kills, times(folder))
        finally:
            process.kill()  # the others end with it
            process.wait()


def section_of(kind: str, kills: list[tuple[str, float]], ends: list[float]) -> Section:
    """How long the job stood still after each kill."""
    gaps = [(end, end - start) for start, end in itertools.pairwise(ends)]
    usual = statistics.median(gap for _, gap in gaps)
    limits = [at for _, at in kills[1:]] + [ends[-1]]
    pauses: dict[str, list[float]] = {victim: [] for victim in VICTIMS}
    for (victim, at), limit in zip(kills, limits, strict=True):
        pauses[victim].append(max(gap for end, gap in gaps if at <= end <= limit) - usual)
    rows: list[Row] = [
        [victim, len(found), statistics.median(found), max(found)] for victim, found in pauses.items()
    ]
    rows.append(["nobody", None, None, max(gap for end, gap in gaps if end < kills[0][1]) - usual])
    columns = [Column("victim"), Column("kills"), Column("median s", "{:.3f}"), Column("worst s", "{:.3f}")]
    return Section(
        f"pauses after kill -9, {kind}: 2 workers, 3 servers, 2 copies",
        columns,
        rows,
        [Goal("the longest pause in seconds", max(max(found) for found in pauses.values()), GOAL)],
        [f"a usual step takes {usual * 1e3:.0f} ms"],
    )
