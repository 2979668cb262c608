"""What each worker of a self-test runs: the checks, one after the other, each with a limit."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch

from shoal.errors import ConfigError
from shoal.selftest.checks import Check, checks
from shoal.selftest.inbox import Inbox
from shoal.selftest.machine import describe_machine
from shoal.selftest.row import Answer, Row, Verdict, joined, key_of
from shoal.world.launch import from_environment
from shoal.world.world import World

LIMIT = 90.0
"""Seconds of one check. Who is not done then has hung, and is ended with the lines at which it stood."""
LEFT_OUT = "left out: "


def work(folder: Path) -> None:
    """Make all checks that have no row yet."""
    inbox = Inbox(folder)
    wanted = inbox.wanted()
    launch = from_environment()
    if launch.local_rank == 0:
        inbox.describe(describe_machine())
    if not wanted.kinds:
        return
    with _limited():
        world = World.open(launch, device=wanted.device)
    chosen = {name: check for name, check in checks(folder).items() if name in wanted.kinds}
    todo = [(kind, subject) for kind, check in chosen.items() for subject in check.subjects]
    for number, (kind, subject) in enumerate(todo, start=1):
        if key_of(kind, subject) in wanted.done:
            continue
        if world.rank == 0:
            inbox.begin(kind, subject)
        with _limited():
            row = _make(world, kind, chosen[kind], subject)
        if world.rank == 0:
            inbox.add(row)
            said = f" ({row.said})" if row.verdict == "failed" else ""
            print(
                f"{number}/{len(todo)}  {row.key}: {row.verdict}, {row.seconds:.1f} s{said}",
                file=sys.stderr,
                flush=True,
            )
    world.close()


def _make(world: World, kind: str, check: Check, subject: str) -> Row:
    """One check. Collective."""
    begun = perf_counter()
    mine = _answer(world, check, subject)
    given = world.gather_values([mine.good, mine.said, dict(mine.numbers)])
    found = joined([Answer(good, said, numbers) for good, said, numbers in given])
    gc.collect()  # before the next, which may look at memory
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    verdict: Verdict = "ok" if found.good else "failed"
    said = found.said
    if said.startswith(LEFT_OUT):
        verdict, said = "left out", said.removeprefix(LEFT_OUT)
    return Row(kind, subject, verdict, said, perf_counter() - begun, found.numbers)


def _answer(world: World, check: Check, subject: str) -> Answer:
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stderr(nowhere),
        ):  # what a run tells its user about a toy
            return check.run(world, subject)
    except ConfigError as refusal:  # the same on every worker: rules look at what all of them have
        return Answer(False, f"{LEFT_OUT}{refusal}")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
