"""Shares that change while a run goes on: who computes what changes, and what is computed does not."""

from __future__ import annotations

import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import shoal, write
from torch import nn
from torch.nn import functional as F

from shoal.balance.remembered import default_path, keep, stored_speeds
from shoal.errors import ConfigError
from shoal.report.events import read_events
from shoal.testing.parity import ParityTrace, largest_difference, take_step, toy_order, trace_run
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.balancing.balancing import Change, key_for
from shoal.train.build import build
from shoal.train.model.whole_model import ModelShape
from shoal.train.run_config import RunConfig
from shoal.train.step_context import StepContext
from shoal.types import StepReport
from shoal.world.world import World

STEPS = 26
SLOWER = 4


def order_of(toy: str, strategy: str, balance: str, accumulate: int, loaders: int = 0) -> RunConfig:
    order = replace(toy_order(TOYS[toy], strategy, accumulate), balance=balance, global_batch=24)
    return replace(order, loader_workers=loaders)


def step_of(parts: StepContext, number: int) -> tuple[StepReport, Change | None]:
    """A step that seems to take a second a sample, and four on the first worker: nothing depends on the machine."""
    report = take_step(parts, number)
    took = parts.loader.handed * (SLOWER if parts.world.rank == 0 else 1)
    return report, parts.balancing.after(replace(report, compute_seconds=float(took), data_seconds=0.0))


def train(
    world: World, toy: str, strategy: str, balance: str, accumulate: int, loaders: int
) -> tuple[ParityTrace, list[int], int]:
    """What came out, how many samples this worker had in each step, and how often shares changed."""
    torch.set_num_threads(1)
    # As under `shoal run`: a worker may have children of its own, and they have torch already.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    parts = build(order_of(toy, strategy, balance, accumulate, loaders), world, record="")[1]
    losses, sizes, changes = [], [], 0
    for number in range(STEPS):
        report, change = step_of(parts, number)
        sizes.append(parts.loader.handed)
        changes += change is not None
        losses.append(report.loss)
    return ParityTrace(losses, parts.whole.parameters()), sizes, changes


CASES = [
    ("odd", "ddp(bucket_mb=0.002)", "dynamic", 2, 1, 0),
    ("odd", "ddp", "dynamic(every=3)", 3, 1, 0),
    ("odd", "zero1", "predict", 2, 1, 1),
    ("accumulated", "zero2(bucket_mb=0.002)", "dynamic", 2, 3, 0),
    ("accumulated", "shared", "static(steps=4)", 2, 2, 1),
    ("uneven", "ddp", "dynamic", 2, 1, 1),
]


@pytest.mark.parametrize(("toy", "strategy", "balance", "workers", "accumulate", "loaders"), CASES)
def test_uneven_shares_equal_one_process(
    toy: str, strategy: str, balance: str, workers: int, accumulate: int, loaders: int
) -> None:
    found = spawn(train, workers, toy, strategy, balance, accumulate, loaders)
    wanted = trace_run(World.alone(), order_of(toy, "solo", "even", workers * accumulate), STEPS)
    for rank, (trace, _, _) in enumerate(found):
        gap, where = largest_difference(wanted, trace)
        assert gap < 1e-12, f"rank {rank}: {gap:.2e} at {where}"
    samples = len(TOYS[toy].data())  # type: ignore[arg-type]
    full = [sizes for sizes in zip(*(sizes for _, sizes, _ in found), strict=True) if sum(sizes) == 24]
    rest = [sizes for sizes in zip(*(sizes for _, sizes, _ in found), strict=True) if sum(sizes) != 24]
    assert all(sum(sizes) == samples % 24 for sizes in rest)
    assert len(set(full[0])) == 1, "at first all have as many"
    slow, *others = full[-1]
    assert slow > 0
    assert 2 * slow < min(others), f"the slow worker has less: {full[-1]}"
    assert len({changes for _, _, changes in found}) == 1, "all decide alike"
    assert 1 <= found[0][2] <= 4


def given(world: World, toy: str, strategy: str) -> tuple[ParityTrace, list[int]]:
    order = order_of(toy, strategy, "static(shares=3/1)", 1)
    parts = build(order, world, record="")[1]
    losses, sizes = [], []
    for number in range(6):
        report = take_step(parts, number)
        assert parts.balancing.after(report) is None
        losses.append(report.loss)
        sizes.append(parts.loader.handed)
    return ParityTrace(losses, parts.whole.parameters()), sizes


@pytest.mark.parametrize(("toy", "strategy"), [("dropout", "ddp"), ("odd", "zero3"), ("dropout", "zero1")])
def test_given_shares_draw_what_one_process_draws(toy: str, strategy: str) -> None:
    """Also where micro-batches draw random numbers: one process divides the step in the same way."""
    found = spawn(given, 2, toy, strategy)
    assert [sizes for _, sizes in found] == [[18] * 6, [6] * 6]
    wanted = trace_run(World.alone(), order_of(toy, "solo", "static(shares=3/1)", 2), 6)
    for trace, _ in found:
        gap, where = largest_difference(wanted, trace)
        assert gap < 1e-12, f"{gap:.2e} at {where}"


def remember(world: World, cache: str, strategy: str) -> tuple[list[int], list[float]]:
    os.environ["XDG_CACHE_HOME"] = cache
    torch.set_num_threads(1)
    parts = build(order_of("odd", strategy, "history", 1), world, record="")[1]
    sizes = []
    for number in range(10):
        step_of(parts, number)
        sizes.append(parts.loader.handed)
    parts.balancing.close()
    world.barrier()
    return sizes, list(
        stored_speeds(default_path(), key_for(ModelShape.of(TOYS["odd"].model()), world), world.size)
    )


def test_history_begins_where_the_last_run_ended(tmp_path: Path) -> None:
    first = spawn(remember, 2, str(tmp_path), "ddp")
    assert first[0][0][0] == 12, "nothing is known at first"
    speeds = first[0][1]
    assert speeds[1] > 2 * speeds[0]
    second = spawn(remember, 2, str(tmp_path), "zero1")
    assert second[0][0][0] < 8, "the first step is uneven already"
    damaged = tmp_path / "shoal" / "speeds.json"
    damaged.write_text("{" * 100_000)
    assert spawn(remember, 2, str(tmp_path), "ddp")[0][0][0] == 12


class Wide(nn.Module):
    """Eight layers of one cost."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wide(strategy: str, balance: str) -> RunConfig:
    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        return F.mse_loss(output, batch[1], reduction="sum"), batch[1].numel()

    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(64, generator=generator), torch.randn(64, generator=generator)) for _ in range(48)]
    return RunConfig(
        model=Wide,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=data,
        global_batch=24,
        strategy=strategy,
        precision="fp64",
        balance=balance,
    )


def stages(world: World, balance: str, cache: str) -> tuple[int, ParityTrace]:
    os.environ["XDG_CACHE_HOME"] = cache
    if balance == "history" and world.rank == 0:
        key = key_for(ModelShape.of(Wide()), world)
        keep(default_path(), key, [4.0, 1.0], now=0.0)
    order = wide("ddp * pp2(1f1b, microbatches=2)", balance)
    parts = build(order, world, record="")[1]
    losses = [take_step(parts, number).loss for number in range(3)]
    mine = sum(p.numel() > 0 for name, p in parts.model.named_parameters() if name.endswith("weight"))
    return mine, ParityTrace(losses, parts.whole.parameters())


@pytest.mark.parametrize("balance", ["static(shares=4/1)", "static(shares=1/4)", "static", "history"])
def test_stages_get_blocks_by_shares(balance: str, tmp_path: Path) -> None:
    found = spawn(stages, 2, balance, str(tmp_path))
    mine = [number for number, _ in found]
    assert sum(mine) == 8
    if balance != "static":  # costs are measured, and vary; so do the speeds that plain static measures
        assert (mine[0] > mine[1]) == ("1/4" not in balance), mine
    wanted = trace_run(World.alone(), wide("solo", "even"), 3)
    for _, trace in found:
        gap, where = largest_difference(wanted, trace)
        assert gap < 1e-12, f"{gap:.2e} at {where}"


def refused(world: World, changes: dict[str, Any]) -> str:
    order = toy_order(TOYS["odd"], changes.pop("strategy", "ddp"))
    try:
        build(replace(order, **changes), world, record="")
    except ConfigError as error:
        return str(error)
    return ""


def all_refused(world: World, cases: list[dict[str, Any]]) -> list[str]:
    return [refused(world, dict(case)) for case in cases]


def test_what_cannot_be_balanced_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "ps", "balance": "dynamic"}, "the servers hand out parts"),
        ({"strategy": "local(4)", "balance": "dynamic"}, "between meetings nobody waits"),
        ({"strategy": "zero3", "balance": "dynamic"}, "with zero3 workers wait for each other"),
        ({"batchnorm": "sync", "balance": "predict"}, "with batchnorm='sync' workers wait"),
        ({"deterministic": True, "balance": "static"}, "with deterministic=True a run repeats itself"),
        ({"strategy": "ddp * pp2", "balance": "dynamic"}, "stages of a pipeline stay what they are"),
        (
            {"strategy": "ddp * pp2", "balance": "static(shares=1/2/3)"},
            "needs as many shares, and there are 3",
        ),
        ({"balance": "static(shares=1/2/3)"}, "shares has 3 numbers for 2 replicas"),
        ({"balance": "dynamic(most=1/2/3)"}, "most has 3 numbers for 2 replicas"),
        ({"balance": "dynamic", "partition": "block(shares=2/1)"}, "both say how much each worker gets"),
    ]
    for found in spawn(all_refused, 2, [case for case, _ in cases]):
        for text, (_, wanted) in zip(found, cases, strict=True):
            assert wanted in text


SLOWED = """
import time

class Slow:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep(0.02 if rank == 0 else 0.0)
        return x[i % 26], y[i % 26]

settings |= dict(data=Slow(), global_batch=16, checkpoint="kept", checkpoint_every=15, progress=True, log="log")
run = shoal.Run(**settings, balance="dynamic(every=4)")
for step in run.steps(int(sys.argv[1])):
    pass
if rank == 0:
    print("first", run._context.loader._picks.sharing.at(15)[1].tolist())
"""


def test_a_run_says_when_shares_change_and_goes_on_with_them(tmp_path: Path) -> None:
    script = write(tmp_path, SLOWED)
    done = shoal(tmp_path, "run", "--workers", "2", script, "15")
    assert done.code == 0, done.err
    assert "samples from step" in done.out
    events = read_events(tmp_path / "log" / "events.jsonl")
    told = [event for event in events if event.get("event") == "shares"]
    assert 1 <= len(told) <= 3
    slow, other = told[-1]["shares"]  # type: ignore[misc]
    assert slow + other == 16
    assert 2 * slow < other
    done = shoal(tmp_path, "run", "--workers", "2", script, "17")
    assert done.code == 0, done.err
    found = next(line for line in done.out.splitlines() if line.startswith("first"))
    first = [float(word) for word in re.findall(r"\d+\.\d+", found)]
    assert 2 * first[0] < first[1], "the first step of the second run is uneven already"
