"""Scripts as a user writes them, and the three ways to start one, each warm (see `warm`) or in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from warm import Command

from shoal.report.events import last_pass, read_events

SOURCE = Path(__file__).parents[2] / "src"
DEADLINE = 150.0

SCRIPT = """
import os, sys, torch, shoal
from torch import nn
from torch.nn import functional as F

rank = int(os.environ.get("RANK", "0"))
generator = torch.Generator().manual_seed(1)
x = torch.randn(26, 5, generator=generator)
y = torch.randint(0, 3, (26,), generator=generator)
data = torch.utils.data.TensorDataset(x, y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 13)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(13, 3)

    def forward(self, x):
        return self.last(F.dropout(torch.tanh(self.scale * self.first(x)), 0.2, self.training))

def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

settings = dict(model=Net, loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), data=data, global_batch=8,
                log="log", progress=False)
"""
"""The start of a script: what shoal.Run needs, in `settings`."""


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    ended: float
    """When."""


def environment(folder: Path) -> dict[str, str]:
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "TMPDIR": str(temporary),
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }


def start(folder: Path, *command: str) -> Command:
    """`python ...`, forked from a process that has torch loaded."""
    return Command(folder, environment(folder), command)


def fresh(folder: Path, *command: str) -> subprocess.Popen[str]:
    """`python ...`, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment(folder),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


Start = Callable[..., "subprocess.Popen[str] | Command"]


def finish(process: subprocess.Popen[str] | Command, timeout: float = DEADLINE) -> Done:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no end after {timeout:.0f} s:\n{out}\n{err}") from None
    assert process.returncode is not None
    return Done(process.returncode, out, err, time.time())


def write(folder: Path, text: str, name: str = "train.py") -> str:
    """A script: the common start and `text`."""
    (folder / name).write_text(SCRIPT + text)
    return name


def shoal(folder: Path, *args: str, start: Start = start) -> Done:
    """`shoal ...` in a folder."""
    return finish(start(folder, "-m", "shoal", *args))


def python(folder: Path, *args: str, start: Start = start) -> Done:
    """`python ...`"""
    return finish(start(folder, *args))


def torchrun(folder: Path, *args: str, start: Start = start, forked: bool = False) -> Done:
    """`torchrun --nproc-per-node 2 ...`. Its workers are fresh interpreters, or forked from it: then torch reports
    errors in another way, and only runs that succeed are the same."""
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    options += ["--run-path", "--start-method", "fork"] if forked else []
    return finish(start(folder, "-m", "torch.distributed.run", *options, *args))


def losses(folder: Path, log: str = "log") -> list[float | None]:
    """The losses in a run's event log, each step once."""
    return [event["loss"] for event in last_pass(read_events(folder / log / "events.jsonl"))]  # type: ignore[misc]
