"""Whether a run that was disturbed ended as the undisturbed one: steps, samples, losses, state, and nothing left."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.report.events import Event, last_pass
from shoal.report.folder import events_path, ranks_in
from shoal.report.follow import Follower

CLOSE = 1e-5
"""How far parameter servers may be from another run of the same: they add in the order in which gradients come."""
GONE_SECONDS = 10.0
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Row:
    """One thing that was checked."""

    name: str
    good: bool
    said: str


@dataclass(frozen=True)
class Traits:
    """What the strategy allows."""

    by_servers: bool
    """Workers meet at servers: sums may round in another order."""
    comparable: bool
    """Two runs of it end alike."""


def traits_of(strategy: str) -> Traits:
    """Of the strategy that a log names."""
    from shoal import exchange
    from shoal.config import parse_strategy
    from shoal.plan.check import promise_of
    from shoal.types import Promise

    plan = parse_strategy(strategy)
    by_servers = exchange.TABLE.look_up(plan.exchange.name).uses_servers
    return Traits(by_servers, not (by_servers and promise_of(plan) is Promise.CONVERGES))


def steps_of(folder: Path, everybody: bool = False) -> list[Event]:
    """The steps in a run's log, each once; `everybody`: in all ranks' logs, for where each does steps of its own.

    A rank that is killed takes the last half second of its log with it.
    """
    ranks = ranks_in(folder / "log") if everybody else [0]
    found: dict[int, Event] = {}
    for rank in reversed(ranks):
        events = last_pass(Follower(events_path(folder / "log", rank)).poll(1 << 32))
        found |= {int(str(event["step"])): event for event in events}
    return [found[number] for number in sorted(found)]


def strategy_of(folder: Path) -> str:
    """As the log's first line says."""
    for event in Follower(events_path(folder / "log", 0)).poll(1 << 32):
        if event.get("event") == "start":
            return str(event.get("strategy", ""))
    return ""


def compare(plain: Path, disturbed: Path, traits: Traits) -> list[Row]:
    """The rows about numbers."""
    one, other = (steps_of(folder, traits.by_servers) for folder in (plain, disturbed))
    numbers = [event.get("step") for event in other]
    wanted = list(range(1, len(one) + 1))
    missing = sorted(set(wanted) - {int(str(n)) for n in numbers})
    said = f"{len(other)} of {len(one)}" + (f"; missing: {missing[:5]}" if missing else ", each once")
    rows = [Row("steps", numbers == wanted, said)]
    counted = [sum(int(str(e.get("samples", 0))) for e in events) for events in (one, other)]
    same = [e.get("samples") for e in one] == [e.get("samples") for e in other]
    rows.append(Row("samples", same, f"{counted[1]} counted, {counted[0]} undisturbed"))
    if not traits.comparable:
        rows.append(Row("losses", True, "not compared: this strategy takes another path each time"))
        rows.append(Row("state", True, "not compared, likewise"))
        return rows
    rows.append(_losses(one, other, CLOSE if traits.by_servers else 0.0))
    rows.append(_state(plain, disturbed, len(one), CLOSE if traits.by_servers else 0.0))
    return rows


def _losses(one: Iterable[Event], other: Iterable[Event], within: float) -> Row:
    pairs = list(zip(one, other, strict=False))
    far = [a["step"] for a, b in pairs if not _near(a.get("loss"), b.get("loss"), within)]
    if far:
        return Row("losses", False, f"differ in {len(far)} steps, first in step {far[0]}")
    return Row(
        "losses",
        True,
        f"equal to {within:g}" if within else "equal to the bit: the same samples in every step",
    )


def _near(a: object, b: object, within: float) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(float(str(a)), float(str(b)), rel_tol=within, abs_tol=within)


def _state(plain: Path, disturbed: Path, step: int, within: float) -> Row:
    from shoal.checkpoint.diff import compare as differences
    from shoal.checkpoint.folder import open_folder
    from shoal.errors import ConfigError

    name = f"step-{step}"
    try:
        entries = [open_folder(folder / "checkpoints" / name) for folder in (plain, disturbed)]
        lost = [entry for entry in entries if entry.manifest is None]
        if lost:
            return Row(
                "state", False, f"{lost[0].folder} cannot be read: {lost[0].problem or 'it is not there'}"
            )
        found = list(differences(*entries))
    except (ConfigError, OSError) as error:
        return Row("state", False, f"cannot be compared: {error}")
    far = [each for each in found if each.problem or min(each.absolute, each.relative) > within]
    if far:
        worst = far[0]
        why = worst.problem or f"{worst.elements} of {worst.numel} elements, by {worst.absolute:.1e}"
        return Row("state", False, f"{len(far)} tensors differ, first {worst.path}: {why}")
    return Row("state", True, f"equal to {within:g}" if found else "equal to the bit")


def leftovers(temporary: Path, plain: Path, memory: Iterable[str], pids: Iterable[int]) -> list[Row]:
    """The rows about what is left; what is ending is waited for.

    `plain`: temporary files of the undisturbed run, for torch leaves some too; `memory`: folders in shared memory that
    the job had; `pids`: its processes, after which torch names segments.
    """
    deadline = time.monotonic() + GONE_SECONDS
    known, numbers = set(memory), {str(pid) for pid in pids}
    usual = {path.name for path in plain.iterdir() if not path.name.startswith("shoal-")}
    while True:
        processes = [p for p in psutil.Process().children(recursive=True) if _lives(p)]
        folders = sorted({path.name for path in temporary.iterdir()} - usual)
        left = sorted(path for path in known if os.path.exists(path))
        left += sorted(str(p) for p in MEMORY.glob("torch_*") if p.name.split("_")[1] in numbers)
        if not (processes or folders or left) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return [
        Row("processes", not processes, _listed([f"{p.pid}" for p in processes])),
        Row("shared memory", not left, _listed(left)),
        Row("temporary files", not folders, _listed(folders)),
    ]


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _listed(names: list[str]) -> str:
    return f"left: {', '.join(names[:5])}" if names else "nothing is left"
