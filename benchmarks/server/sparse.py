"""A table of 10⁷ rows of 64 numbers on two servers: what a step sends, takes and needs.

    scripts/bench sparse                about two minutes on two cores
    scripts/bench sparse --rows 1000000

Ids follow Zipf's law (s = 1.1), 4096 of them a step. Bytes are those of the worker's sockets in both directions,
heartbeats, headers and the dense layer included; what stands beside them as ideal is every row that the batch has,
once there and once back, each with its id, and nothing else. A dense table would move all of it twice.

    empty    rows take memory when they get their first gradient
    full     every row is there when training begins

Half of the steps, ten in a row, fetch rows when they need them; the others ask for them while the step before is
computed, as SparseEmbedding does that is told where a batch has its ids. Goals: at most 1.2 times the ideal bytes, and
100 times fewer than a dense table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.workload.process_memory import resident
from benchmarks.workload.servers import Servers
from benchmarks.workload.steps import Steps
from shoal.exchange.ps import Ps
from shoal.exchange.row_tables import RowPiece
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.world.world import World

DIM = 64
IDS = 4096
A_SAMPLE = 16
MOST, LEAST = 1.2, 100.0
"""Bytes a step: so many times the ideal at most, and so many times less than a dense table at least."""
TURN = 10


class Clicks(nn.Module):
    """A table and a layer behind it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.items = shoal.SparseEmbedding(rows, DIM)
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.items(ids).mean(1))
        return out


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return ((output.squeeze(1) - batch[1]) ** 2).sum(), len(output)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def zipf(rows: int, count: int, power: float = 1.1) -> torch.Tensor:
    """So many ids, the k-th of them with a frequency like k to the minus `power`."""
    heap = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -power)
    drawn = np.random.default_rng(0).random(count) * heap[-1]
    return torch.from_numpy(np.minimum(np.searchsorted(heap, drawn), rows - 1))


def all_rows(rows: int, at_once: int = 1 << 15) -> Iterator[RowPiece]:
    """Every row of the table, as a checkpoint would bring it."""
    for start in range(0, rows, at_once):
        ids = torch.arange(start, min(start + at_once, rows)).unsqueeze(1)
        count = len(ids)
        step = torch.ones(count, 1, dtype=torch.int32)
        yield (
            "items",
            {
                "id": ids,
                "clock": torch.zeros_like(ids),
                "step": step,
                "values": torch.full((count, DIM), 0.01),
            },
        )


@dataclass(frozen=True)
class Found:
    """Of all steps that count."""

    seconds: list[float]
    """Of steps that fetch rows when they need them."""
    ahead: list[float]
    """Of steps whose rows were asked for ahead."""
    sent: list[int]
    received: list[int]
    unique: list[int]
    loading: float
    memory: list[int]
    """Bytes of each server."""
    held: int
    """Rows that take memory."""


def train(rows: int, steps: int, full: bool) -> Found:
    """Half of the steps ask for their rows ahead."""
    warm = TURN
    ids = zipf(rows, (steps + warm) * IDS).view(-1, A_SAMPLE)
    with Servers(2) as servers:
        config = RunConfig(
            model=lambda: Clicks(rows),
            loss=loss,
            optimizer=sgd,
            data=TensorDataset(ids, torch.zeros(len(ids))),
            global_batch=IDS // A_SAMPLE,
            strategy=f"ps(bsp, servers=2, replicas=1, {servers.options})",
            shuffle=False,
        )
        context = build(config, World.alone(), record="")[1]
        exchange, made = context.exchange, Steps(context)
        assert isinstance(exchange, Ps)
        wire, began = exchange.link._transport.wire, time.perf_counter()
        if full:
            exchange.tables.load(0, all_rows(rows))
        loading = time.perf_counter() - began
        seconds: tuple[list[float], list[float]] = ([], [])
        sent, received, unique = list[int](), list[int](), list[int]()
        items = context.model.get_submodule("items")
        assert isinstance(items, shoal.SparseEmbedding)
        for number in range(steps + warm):
            before = wire.sent_bytes + exchange.link._transport.shared_bytes, wire.received_bytes
            began, ahead = time.perf_counter(), number // TURN % 2
            items.ids = (lambda batch: batch[0]) if ahead else None
            made.next()
            if number >= warm:
                if number % TURN:  # the first of its kind had no step before it to ask in
                    seconds[ahead].append(time.perf_counter() - began)
                sent.append(wire.sent_bytes + exchange.link._transport.shared_bytes - before[0])
                received.append(wire.received_bytes - before[1])
                mine = ids[number * (IDS // A_SAMPLE) : (number + 1) * (IDS // A_SAMPLE)]
                unique.append(len(torch.unique(mine)))
        memory = [resident("VmRSS", pid) for pid in servers.pids[1:]]
        held = sum(int(fact["rows"]) for fact in exchange.tables.facts())
        exchange.close()
    return Found(*seconds, sent, received, unique, loading, memory, held)


def section_of(title: str, rows: int, found: Found) -> Section:
    """What came of it, beside its goals."""
    row = 8 + DIM * 4
    nbytes = statistics.mean(a + b for a, b in zip(found.sent, found.received, strict=True))
    ideal = statistics.mean(2 * row * unique for unique in found.unique)
    dense = 2 * rows * DIM * 4
    unique_ids = statistics.mean(found.unique)
    kinds = {"when needed": found.seconds, "ahead": found.ahead}
    table: list[Row] = []
    for name, seconds in kinds.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        table.append([name, middle * 1e3, low * 1e3, high * 1e3, unique_ids / middle])
    memory = " and ".join(f"{size / 2**30:.2f}" for size in found.memory)
    notes = [
        f"{unique_ids:.0f} of the ids of a step are unique",
        f"a step sends {statistics.mean(found.sent) / 1e3:.0f} kB "
        f"and receives {statistics.mean(found.received) / 1e3:.0f} kB",
        f"servers take {memory} GiB for {found.held:,} rows ({found.held * DIM * 4 / 2**30:.2f} GiB of values)",
    ]
    if found.loading > 1:
        notes.append(f"loaded in {found.loading:.1f} s, {rows / found.loading:,.0f} rows/s")
    goals = [
        Goal("bytes / ideal", nbytes / ideal, MOST),
        Goal("dense / bytes", dense / nbytes, LEAST, least=True),
    ]
    return Section(f"{title}: {rows:.0e} rows × {DIM}, {IDS} ids a step", COLUMNS, table, goals, notes)


COLUMNS = (
    Column("rows are fetched"),
    Column("median ms", "{:.1f}"),
    Column("25 % below", "{:.1f}"),
    Column("75 % below", "{:.1f}"),
    Column("rows/s", "{:,.0f}"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How large the table is, and how long it is trained."""
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--steps", type=int, default=100)


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """The table as it fills, and full."""
    torch.set_num_threads(1)
    yield section_of("empty", options.rows, train(options.rows, options.steps, full=False))
    yield section_of("full", options.rows, train(options.rows, options.steps, full=True))
