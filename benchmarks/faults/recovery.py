"""`kill -9` of one of four workers: how soon the run goes on, beside torchrun, and its cost while nothing happens.

    scripts/bench recovery [--rounds 3] [--strategies ddp,ps] [--quick]

Each strategy trains the same script undisturbed, under `shoal run` with a kill, and under `torchrun --max-restarts`
with a kill, in turns. The script keeps checkpoints every 40 steps: torchrun's workers go on from these. What is
measured:

    seen            from the kill to the launcher's sentence about it
    stopped         from the kill until no worker of before is there
    next step       from the kill to the first committed step that had not been before
    lost            steps whose loss is another one than undisturbed, and the state at the end
    share           of the undisturbed steps, with one kill a minute, from the seconds that one kill has cost
    cost            time of undisturbed steps with recovery / without (--retries 0)

Goals: seen within 0.1 s, stopped 1 s after that, next step within 3 s and at least 3 times sooner than torchrun,
nothing lost, 97 % of the steps, at most 1 % of a step. --quick: one round of ddp and ps, to see whether it works.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report.result import Cell, Column, Goal, Section
from benchmarks.workload.turns import forth_and_back

WORKERS = 4
STEPS = 160
KILL_AT = 70
STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "shared",
    "ddp * tp2",
    "ddp * pp2(microbatches=2)",
    "local(8)",
    "ps",
)
WITHOUT_TORCHRUN = ("ps",)
"""Its servers come with `shoal run`."""
DEADLINE = 300.0
MINUTE = 60.0
SCRIPT = """
import hashlib, os, sys, time
import torch, shoal
from torch import nn
from torch.nn import functional as F

rank, steps = int(os.environ["RANK"]), int(sys.argv[2])
open(f"pid-{rank}-{os.getpid()}", "w").close()
make = torch.Generator().manual_seed(1)
x, y = torch.randn(1024, 64, generator=make), torch.randint(0, 8, (1024,), generator=make)


def model():
    middle = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), *middle, nn.Linear(256, 8))


run = shoal.Run(
    model=model,
    loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
    optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), data=torch.utils.data.TensorDataset(x, y), global_batch=128,
    strategy=sys.argv[1], checkpoint="checkpoints", checkpoint_every=40, log="log", progress=False)
for step in run.steps(steps):
    if rank == 0:
        with open("steps", "a") as file:
            file.write(f"{step.number} {time.monotonic()} {step.loss!r}\\n")
state = run.state_dict()
if rank == 0:
    text = b"".join(value.numpy().tobytes() for value in state.values())
    open("end", "w").write(hashlib.sha256(text).hexdigest())
"""


@dataclass
class Seen:
    """What one run showed."""

    seen: float = 0.0
    stopped: float = 0.0
    next_step: float = 0.0
    seconds: float = 0.0
    """From the first committed step to the last."""
    losses: dict[int, str] = field(default_factory=dict)
    end: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """How often, and of what."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="some of them, with commas")
    parser.add_argument("--quick", action="store_true", help="one round of ddp and ps")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a strategy, and one section for the cost."""
    quick = options.quick
    names = ["ddp", "ps"] if quick else options.strategies.split(",")
    rounds = 1 if quick else options.rounds
    rows: list[list[Cell]] = []
    goals: list[Goal] = []
    costs: dict[str, float] = {}
    for name in names:
        found = _turns(name, rounds)
        row, mine = _row(name, found)
        rows.append(row)
        goals += mine
        with_it, without = (statistics.median(s.seconds for s in found[kind]) for kind in ("plain", "bare"))
        costs[name] = with_it / without
    title = f"kill -9 of one of {WORKERS} workers, medians of {rounds}"
    yield Section(title, COLUMNS, rows, goals, part="kill")
    goal = Goal("time with recovery / without, median", statistics.median(costs.values()), 1.01)
    columns = [Column("strategy"), Column("with / without", "{:.3f}")]
    yield Section(
        "steps while nothing fails", columns, [[n, c] for n, c in costs.items()], [goal], part="cost"
    )


COLUMNS = [
    Column("strategy"),
    Column("seen", "seconds"),
    Column("stopped", "seconds"),
    Column("next step", "seconds"),
    Column("torchrun's", "seconds"),
    Column("sooner", "{:.1f} ×"),
    Column("steps lost"),
    Column("share", "{:.1%}"),
]


def _turns(name: str, rounds: int) -> dict[str, list[Seen]]:
    """Undisturbed with recovery and without it, killed, and killed under torchrun; by turns."""
    run = ("-m", "shoal", "run", "--workers", str(WORKERS))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS), "--max-restarts", "3")
    torchrun += ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    kinds: dict[str, tuple[tuple[str, ...], bool]] = {
        "plain": (run, False),
        "bare": ((*run, "--retries", "0"), False),
        "killed": (run, True),
    }
    if name not in WITHOUT_TORCHRUN:
        kinds["torchrun"] = (torchrun, True)
    found: dict[str, list[Seen]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind in forth_and_back(list(kinds), turn):
            words, kill = kinds[kind]
            found[kind].append(once(words, name, kill))
    return found


def _row(name: str, found: dict[str, list[Seen]]) -> tuple[list[Cell], list[Goal]]:
    killed = found["killed"]
    plain = found["plain"][0]
    seen, stopped, following = (
        statistics.median(getattr(each, what) for each in killed) for what in ("seen", "stopped", "next_step")
    )
    theirs = [each.next_step for each in found.get("torchrun", [])]
    other = statistics.median(theirs) if theirs else None
    lost = max(_lost(plain, each, exact=name not in WITHOUT_TORCHRUN) for each in killed)
    undisturbed = statistics.median(each.seconds for each in found["plain"])
    extra = max(0.0, statistics.median(each.seconds for each in killed) - undisturbed)
    share = 1.0 - extra / MINUTE
    goals = [
        Goal(f"{name}: seconds until seen", seen, 0.1),
        Goal(f"{name}: seconds until stopped, after that", max(0.0, stopped - seen), 1.0),
        Goal(f"{name}: seconds to the next step", following, 3.0),
        Goal(f"{name}: steps lost", float(lost), 0.0),
        Goal(f"{name}: share of the steps with a kill a minute", share, 0.97, least=True),
    ]
    if name in WITHOUT_TORCHRUN:  # the others go on: there is nobody to stop
        del goals[1]
    if other is not None:
        goals.append(Goal(f"{name}: times sooner than torchrun", other / following, 3.0, least=True))
    shown = None if name in WITHOUT_TORCHRUN else stopped
    return [name, seen, shown, following, other, other and other / following, lost, share], goals


def _lost(plain: Seen, killed: Seen, exact: bool) -> int:
    """Steps that are missing or have another loss, and one for another state at the end."""
    if not exact:  # servers add in the order in which gradients come, and each worker logs its own steps
        return int(not killed.end)
    different = [step for step, loss in plain.losses.items() if killed.losses.get(step) != loss]
    return len(different) + int(plain.end != killed.end)


def once(words: tuple[str, ...], strategy: str, kill: bool) -> Seen:
    """One run of the script in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        process = subprocess.Popen(
            [sys.executable, *words, "train.py", strategy, str(STEPS)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines: list[tuple[float, str]] = []
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        seen = Seen()
        try:
            if kill:
                _kill(folder, seen, lines, goes_on=strategy in WITHOUT_TORCHRUN)
            code = process.wait(DEADLINE)
        finally:
            process.kill()
        reader.join(5)
        if code:
            tail = "".join(line for _, line in lines[-20:])
            raise RuntimeError(f"{' '.join(words)} under {strategy} ended with {code}:\n{tail}")
        steps = _steps(folder)
        seen.seconds = steps[-1][1] - steps[0][1]
        seen.losses = {number: loss for number, _, loss in steps}
        seen.end = (folder / "end").read_text()
        return seen


def _read(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.append((time.monotonic(), line))


def _steps(folder: Path) -> list[tuple[int, float, str]]:
    """Number, moment and loss of each committed step, as the first worker wrote them."""
    try:
        text = (folder / "steps").read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text.rpartition("\n")[0].splitlines()]
    return [(int(number), float(moment), loss) for number, moment, loss in rows]


def _kill(folder: Path, seen: Seen, lines: list[tuple[float, str]], goes_on: bool) -> None:
    """Kill worker 1 in the middle of the run, and take down what follows. `goes_on`: the others do not stop."""
    _until(lambda: any(number >= KILL_AT for number, _, _ in _steps(folder)))
    pids = {int(file.name.split("-")[2]): int(file.name.split("-")[1]) for file in folder.glob("pid-*")}
    victim = next(pid for pid, rank in pids.items() if rank == 1)
    before = max(number for number, _, _ in _steps(folder))
    spoken = len(lines)
    begun = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _until(lambda: len(lines) > spoken or not any(_alive(pid) for pid in pids))
    seen.seen = (lines[spoken][0] if len(lines) > spoken else time.monotonic()) - begun
    since = begun
    if goes_on:  # the others do not stop
        _until(lambda: any(n > before and at > begun for n, at, _ in _steps(folder)))
    else:
        _stopped(list(pids), begun, seen)
        since = begun + seen.stopped
        # Under `local` the first worker makes steps until it meets the others: those are done again, and do not count.
        before = max(number for number, _, _ in _steps(folder))
        _until(lambda: any(n > before and at > since for n, at, _ in _steps(folder)))
    seen.next_step = min(at for n, at, _ in _steps(folder) if n > before and at > since) - begun


def _stopped(pids: list[int], begun: float, seen: Seen) -> None:
    while any(_alive(pid) for pid in pids) and time.monotonic() - begun < 30:
        time.sleep(0.002)
    seen.stopped = time.monotonic() - begun


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("it did not happen in time")
        time.sleep(0.005)
