"""What it costs that a run checks itself in every step: calls, settings, hooks, frozen parameters, draws of a data set.

    scripts/bench checks

Goal: all checks together take at most 20 microseconds, 1 % of a step of 2 ms.

Each check is called in a tight loop on the parts of a real run of 1, 2 and 4 workers that has made its first steps;
what counts is the processor's time of the quickest of five such loops. Then the same run trains in short blocks with
the checks and without them, in turns: only this benchmark can switch them off.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import TensorDataset

import shoal
from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.training.overhead import adamw, loss, net
from shoal.testing.spawn import spawn
from shoal.train.technique.loss import check_gradient
from shoal.train.technique.stop_request import StopRequest
from shoal.world.world import World

WORKERS = (1, 2, 4)
BATCH = 64
"""A step of one worker then takes about 2 ms."""
BLOCKS, STEPS, CALLS, REPEATS = 20, 25, 2000, 5
STEP_SECONDS = 2e-3
GOAL = 0.01


class Samples(TensorDataset):
    """Rows that are given one by one, as a data set of a user's own does: what it draws is watched."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return super().__getitem__(index)


class Nothing:
    """In the place of a check that is switched off."""

    computing = False

    def begin(self) -> None:
        """A step's passes begin."""


def make_run(workers: int) -> shoal.Run:
    """A run whose workers take a step of about 2 ms each."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4096, 256, generator=generator), torch.randint(0, 10, (4096,), generator=generator)
    return shoal.Run(
        model=net,
        loss=loss,
        optimizer=adamw,
        data=Samples(x, y),
        collate=lambda samples: tuple(map(torch.stack, zip(*samples, strict=True))),
        global_batch=BATCH * workers,
        strategy="ddp",
        log=None,
        progress=False,
    )


def checks_of(run: shoal.Run) -> dict[str, Callable[[], object]]:
    """By name, what each check does in a step."""
    context, loop, calls = run._context, run._loop, run._calls
    watch: Callable[[Any], object] = context.loader._prepare._watch  # type: ignore[union-attr]
    stop = StopRequest(context.world, 1, True, "")
    users = [1.0] * len(list(context.model.parameters()))
    total = next(context.model.parameters()).sum()
    done = run._progress.step

    def compare_calls() -> None:
        calls.step(done)
        calls.step(done)

    def between_steps() -> None:
        loop._enter_body(run._progress, done, last=False)
        loop._save_decided(run._progress)
        loop._leave_body(run._progress)

    return {
        "calls of other ranks": compare_calls,
        "hooks, frozen parameters": context.learning.begin,
        "frozen elsewhere": lambda: (all(users), min(users)),
        "draws of the data set": lambda: watch(lambda keyed: keyed),
        "a loss without gradient": lambda: check_gradient(total),
        "signals": lambda: stop.reached(done),
        "decisions of the loop's body": between_steps,
    }


@contextmanager
def switched_off(run: shoal.Run) -> Iterator[None]:
    """The run without its checks."""
    context, calls = run._context, run._calls
    fetcher: Any = context.loader._prepare  # type: ignore[union-attr]
    learning, watch = context.learning, fetcher._watch
    context.learning = Nothing()  # type: ignore[assignment]
    fetcher._watch = lambda read: read(())
    calls.step = lambda _: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        context.learning = learning
        fetcher._watch = watch
        del calls.step  # type: ignore[method-assign]


Found = tuple[dict[str, float], float, float]
"""Seconds of each check; of a step with checks, and of one without, in the quickest block."""


def measure_rank(world: World, blocks: int) -> Found:
    """On one of several workers."""
    torch.set_num_threads(1)
    if world.size > 1:
        told = {"RANK": world.rank, "LOCAL_RANK": world.rank}
        told |= {"WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
        os.environ.update({name: str(value) for name, value in told.items()})
    run = make_run(world.size)
    steps = run.steps(10**9)
    for _ in range(5):
        next(steps)
    found = {
        name: min(per_call(check, CALLS, time.thread_time) for _ in range(REPEATS))
        for name, check in checks_of(run).items()
    }
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * blocks):
        checked = turn % 4 in (0, 3)  # nobody always follows the same other
        if checked:
            times[True].append(per_call(lambda: next(steps), STEPS))
        else:
            with switched_off(run):
                times[False].append(per_call(lambda: next(steps), STEPS))
    steps.close()  # type: ignore[attr-defined]
    return found, min(times[True]), min(times[False])


def per_call(
    function: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one of several calls in a row."""
    start = clock()
    for _ in range(calls):
        function()
    return (clock() - start) / calls


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long."""
    parser.add_argument("--blocks", type=int, default=BLOCKS)


def measure(asked: argparse.Namespace) -> Iterator[Section]:
    """A table of checks, and one of steps."""
    found = {
        workers: spawn(measure_rank, workers, asked.blocks, timeout=600)[0]
        if workers > 1
        else measure_rank(World.alone(), asked.blocks)
        for workers in WORKERS
    }
    names = list(found[1][0])
    columns = [Column("check"), *(Column(f"{n} worker{'s' * (n > 1)}, us", "{:.1f}") for n in WORKERS)]
    rows: list[Row] = [[name, *_microseconds([found[n][0][name] for n in WORKERS])] for name in names]
    sums = [sum(found[n][0].values()) for n in WORKERS]
    rows.append(["all", *_microseconds(sums)])
    goals = [
        Goal(f"all checks of {n} worker{'s' * (n > 1)} / a step of 2 ms", took / STEP_SECONDS, GOAL)
        for n, took in zip(WORKERS, sums, strict=True)
    ]
    yield Section("what the checks of a step take, processor time", columns, rows, goals, part="checks")
    columns = [
        Column("workers"),
        Column("with, ms", "{:.3f}"),
        Column("without, ms", "{:.3f}"),
        Column("with / without", "{:.3f}"),
    ]
    rows = [[n, on * 1e3, off * 1e3, on / off] for n, (_, on, off) in found.items()]
    yield Section(
        f"a step with and without them, the quickest of {asked.blocks} blocks of {STEPS} each",
        columns,
        rows,
        part="steps",
    )


def _microseconds(seconds: Sequence[float]) -> list[float]:
    return [value * 1e6 for value in seconds]
