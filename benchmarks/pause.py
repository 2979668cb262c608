"""How long a job stands still after `kill -9` of a server or of the coordinator.

    scripts/bench server pause

`shoal run` trains a model with two workers and three servers: a small one, one step every 20 ms or so; one with rows of
a `SparseEmbedding`; and one of 20 M parameters, of which a new server gets some 200 MB with Adam. Now and then
the head of the ledger's chain is killed, its tail, or the coordinator. A pause is the longest time between two steps
after a kill, less that of a usual step. The next kill comes when all copies are whole again.
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
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.exchange.ps import Ps
from shoal.server.view import LEDGER

MODELS = ("small", "rows", "20 M parameters")
VICTIMS = ("head", "tail", "coordinator")
GOAL = 1.0
"""Seconds, for the longest pause of all."""
QUIET = 1.5
"""Seconds to look at after a kill."""


def make_model(kind: str) -> nn.Module:
    if kind == "rows":
        return nn.Sequential(shoal.SparseEmbedding(10**5, 16), nn.Flatten(), nn.Linear(128, 2))
    width, depth = (64, 0) if kind == "small" else (2048, 5)
    inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), *inner, nn.Linear(width, 2))


def job(folder: Path, kind: str) -> None:
    """The training script: every worker writes down when it made each step; the first one how the servers are."""
    generator = torch.Generator().manual_seed(0)
    if kind == "rows":
        points = torch.randint(10**5, (4096, 8), generator=generator)
        classes = (points[:, 0] > 50_000).long()
    else:
        points = torch.randn(4096, 8, generator=generator)
        classes = (points.sum(1) > 0).long()
    data = torch.utils.data.TensorDataset(points, classes)

    def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)
        return F.cross_entropy(output, batch[1], reduction="sum"), batch[1].numel()

    run = shoal.Run(
        model=lambda: make_model(kind),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        data=data,
        global_batch=64,
        clip=None if kind == "rows" else 1.0,
        log=None,
        progress=False,
    )
    exchange = run._parts.exchange
    assert isinstance(exchange, Ps)
    with (folder / f"steps-{run.world.rank}").open("a") as file:
        for step in run.steps(10**6):
            file.write(f"{step.number} {time.monotonic()}\n")
            file.flush()
            if run.world.rank == 0:
                view, news = exchange.link.client.view, exchange.link.news
                chain = [view.addresses[server] for server in view.chains[LEDGER]]
                now = {
                    "epoch": view.epoch,
                    "chain": chain,
                    "whole": news.get("whole"),
                    "of": news.get("epoch"),
                }
                (folder / ".status").write_text(json.dumps(now))
                (folder / ".status").rename(folder / "status")


def listener(launcher: psutil.Process, address: str) -> int:
    """The process behind an address."""
    port = int(address.rpartition(":")[2])
    for child in launcher.children():
        if child.name().startswith("shoal-") and any(
            c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in child.net_connections("tcp")
        ):
            return child.pid
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


def measure(turns: int) -> int:
    return sum(measure_one(kind, turns) for kind in MODELS)


def measure_one(kind: str, turns: int) -> int:
    kills: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "shoal", "run", "--workers", "2", "--strategy", "ps(servers=3)"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*command, __file__, name, kind], env=environment)
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
            return report(kind, kills, times(folder))
        finally:
            process.kill()  # the others end with it
            process.wait()


def report(kind: str, kills: list[tuple[str, float]], ends: list[float]) -> int:
    from server import verdict

    gaps = [(end, end - start) for start, end in itertools.pairwise(ends)]
    usual = statistics.median(gap for _, gap in gaps)
    limits = [at for _, at in kills[1:]] + [ends[-1]]
    print(
        f"\npauses after kill -9, {kind}: 2 workers, 3 servers, 2 copies; a usual step takes {usual * 1e3:.0f} ms"
    )
    print(f"{'victim':<14} {'kills':>6} {'median s':>10} {'worst s':>10}")
    pauses: dict[str, list[float]] = {victim: [] for victim in VICTIMS}
    for (victim, at), limit in zip(kills, limits, strict=True):
        pauses[victim].append(max(gap for end, gap in gaps if at <= end <= limit) - usual)
    for victim, found in pauses.items():
        print(f"{victim:<14} {len(found):>6} {statistics.median(found):>10.3f} {max(found):>10.3f}")
    undisturbed = [gap for end, gap in gaps if end < kills[0][1]]
    print(f"{'nobody':<14} {'':>6} {'':>10} {max(undisturbed) - usual:>10.3f}")
    return int(verdict("the longest pause in seconds", max(max(found) for found in pauses.values()), GOAL))


if __name__ == "__main__":
    job(Path(sys.argv[1]), sys.argv[2])
