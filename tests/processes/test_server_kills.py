"""`kill -9` of servers, coordinator and workers of a real job: it ends with the same bits as an undisturbed one.

Under bsp every update is one sum over one step's samples, so an update that was lost, or applied twice, or made from
other samples, would change all losses after it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from warm import Command

HERE = Path(__file__).parent
PAUSE = 0.02
KILLS, STEPS = 10, 350
ALL_KILLS, ALL_STEPS = 50, 700
"""With `--all`."""


class Job:
    """`shoal run` of the job, in the background."""

    def __init__(
        self, folder: Path, steps: int, pause: float, strategy: str, workers: int = 2, kind: str = ""
    ) -> None:
        folder.mkdir()
        self.folder, self.steps = folder, steps
        script = [str(HERE / "server_job.py"), str(folder), str(steps), str(pause), *kind.split()]
        command = ["-m", "shoal", "run", "--workers", str(workers), "--strategy", strategy, *script]
        self.process = Command(folder, {**os.environ, "OMP_NUM_THREADS": "1"}, command)

    def children(self, name: str) -> list[int]:
        """Processes of the launcher by what they are called."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                if child.name().startswith(name) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child.pid)
            except psutil.NoSuchProcess:
                continue
        return sorted(found)

    def workers(self) -> list[int]:
        """They have the launcher's name."""
        return self.children(psutil.Process(self.process.pid).name())

    def status(self, rank: int = 0) -> dict[str, object]:
        try:
            found: dict[str, object] = json.loads((self.folder / f"status-{rank}").read_text())
        except FileNotFoundError:
            return {"step": 0, "epoch": 0, "whole": False}
        return found

    def running(self) -> bool:
        return self.process.poll() is None and int(str(self.status()["step"])) < self.steps - 20

    def end(self) -> str:
        try:
            errors = self.process.communicate(timeout=120)[1]
        finally:
            self.process.terminate()  # the launcher takes all others with it
        assert self.process.returncode == 0, errors
        return errors

    def losses(self, rank: int) -> dict[int, float]:
        lines = [json.loads(line) for line in (self.folder / f"losses-{rank}").read_text().splitlines()]
        return {number: loss for number, loss, _ in lines}

    def parameters(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / "parameters.pt")
        return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, everything: bool) -> Job:
    """ddp, so that it is shown too that a parameter server computes what ddp does."""
    job = Job(tmp_path_factory.mktemp("jobs") / "ddp", ALL_STEPS if everything else STEPS, 0.0, "ddp")
    job.end()
    return job


def compare(job: Job, undisturbed: Job) -> None:
    """Every loss, and if the jobs are as long as each other, what they have at the end."""
    wanted = undisturbed.losses(0)
    seen: dict[int, float] = {}
    for rank in (0, 1):
        for number, loss in job.losses(rank).items():
            assert loss == wanted[number], f"rank {rank}, step {number}"
            assert seen.setdefault(number, loss) == loss, f"ranks disagree about step {number}"
    assert set(seen) >= set(range(1, job.steps + 1)), "some step was done by nobody"
    if job.steps < undisturbed.steps:
        return
    for name, value in undisturbed.parameters().items():
        assert torch.equal(job.parameters()[name], value), name


def test_servers_are_killed(tmp_path: Path, undisturbed: Job, everything: bool) -> None:
    wanted = ALL_KILLS if everything else KILLS
    draw, kills, last = random.Random(1), 0, 0
    job = Job(tmp_path / "ps", undisturbed.steps, PAUSE, "ps(servers=3)")
    while kills < wanted and job.running():
        status = job.status()
        servers = job.children("shoal-server")
        if status.get("whole") and int(str(status["epoch"])) > last and len(servers) == 3:
            last = int(str(status["epoch"]))
            os.kill(draw.choice(servers), signal.SIGKILL)
            kills += 1
        time.sleep(0.005)
    job.end()
    assert kills == wanted, f"the job was over after {kills} kills"
    compare(job, undisturbed)


def test_coordinator_and_workers_are_killed(tmp_path: Path, undisturbed: Job) -> None:
    draw, done = random.Random(2), 0
    job = Job(tmp_path / "ps", 260, PAUSE, "ps")
    while done < 4 and job.running():
        step = int(str(job.status()["step"]))
        if step >= 50 * (done + 1):
            coordinator = job.children("shoal-coord")
            victims = coordinator if done % 2 == 0 else [draw.choice(job.workers())]
            os.kill(victims[0], signal.SIGKILL)
            done += 1
        time.sleep(0.01)
    errors = job.end()
    assert done == 4
    assert errors.count("another takes its place") == 2
    compare(job, undisturbed)


def test_servers_of_rows_and_the_coordinator_are_killed(tmp_path: Path) -> None:
    steps, strategy = 60, "ps(servers=3)"
    undisturbed = Job(tmp_path / "undisturbed", steps, PAUSE, strategy, kind="rows")
    draw, last = random.Random(3), 0
    victims = ["shoal-server", "shoal-coord", "shoal-server"]
    job = Job(tmp_path / "killed", steps, PAUSE, strategy, kind="rows")
    while victims and job.running():
        status, servers = job.status(), job.children("shoal-server")
        step, epoch = int(str(status["step"])), int(str(status["epoch"]))
        due = 7 * (4 - len(victims))  # a few steps after the last: the new coordinator must know its servers
        if step >= due and status.get("whole") and epoch > last and len(servers) == 3:
            last = epoch - (victims[0] == "shoal-coord")  # which need not change the view
            os.kill(draw.choice(job.children(victims.pop(0))), signal.SIGKILL)
        time.sleep(0.005)
    job.end()
    undisturbed.end()
    assert not victims, f"the job was over before {victims} were killed"
    compare(job, undisturbed)
    rows = job.parameters()
    assert len(rows["words/values"]) > 1000
    assert set(rows) > {"tags/values", "words/state.exp_avg", "words/step", "head.weight"}
