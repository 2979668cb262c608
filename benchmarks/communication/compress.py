"""What compressors cost: encode and decode of 100 MB of gradients on one core, beside a copy of as many bytes.

    scripts/bench compress [--turns 15]

Contestants take turns, so load from elsewhere meets all of them. Each figure is the median over the turns; that of
`× copy` is the median of the ratios to the copy of the same turn. `adding` decodes into a sum, as payloads that are
gathered are; `feedback` is what error feedback adds to a turn. Goals: encode and decode take at most 2 copies with fp16
and bf16, 4 with int8 and 15 with topk(0.01).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.report.result import Column, Goal, Row, Section
from shoal.compress import make_compressor
from shoal.compress.base import Layout
from shoal.compress.feedback import Feedback
from shoal.config import parse_choice

MB = 1 << 20
SIDE, MATRICES = 1024, 25
SIZE = MATRICES * SIDE * SIDE
LAYOUT = Layout(
    SIZE,
    torch.float32,
    torch.device("cpu"),
    tuple((i * SIDE * SIDE, SIDE, SIDE) for i in range(MATRICES)),
)
CHOICES = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "sign",
    "topk(0.01)",
    "topk(0.001)",
    "randomk(0.1)",
    "powersgd(4)",
)
GOALS = {"fp16": 2.0, "bf16": 2.0, "int8": 4.0, "topk(0.01)": 15.0}
"""Encode and decode, in copies."""


def timed(call: Callable[[], object]) -> float:
    """Seconds that this thread had a core: everything here runs on one, and other processes may want it too."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


class Contestant:
    """One compressor, with its payload and what each turn of it took."""

    def __init__(self, text: str) -> None:
        self.compressor = make_compressor(parse_choice(text, "compressor"))
        self.code = self.compressor.code(LAYOUT)
        self.payload = self.code.payload()
        self.turn = 0
        self.times: list[tuple[float, float, float, float]] = []
        """Encode, decode, decode into a sum, feedback."""

    def take_turn(self, vector: torch.Tensor, out: torch.Tensor, feedback: torch.Tensor) -> None:
        said = self.payload
        self.turn += 1

        def encode() -> None:
            nonlocal said
            self.code.encode(vector, self.payload, self.turn)
            if self.code.rounds == 2:
                said = self.code.second(vector, self.payload)

        encoding = timed(encode)
        decoding = timed(lambda: self.code.decode(said, out, add=False))
        adding = timed(lambda: self.code.decode(said, out, add=True))
        keeper = Feedback(self.code, Layout(0, torch.float32, LAYOUT.device))
        keeper.residual = feedback.zero_()
        keeping = timed(lambda: keeper.before(out)) + timed(lambda: keeper.after(said, 1))
        self.times.append((encoding, decoding, adding, keeping))


def contest(turns: int) -> tuple[list[float], dict[str, Contestant]]:
    """Seconds of a copy in each turn, and the contestants."""
    torch.manual_seed(0)
    vector, out, residual = torch.randn(SIZE), torch.zeros(SIZE), torch.zeros(SIZE)
    contestants = {text: Contestant(text) for text in CHOICES}
    copies = []
    for _ in range(turns + 1):
        copies.append(statistics.median(timed(lambda: out.copy_(vector)) for _ in range(3)))
        for contestant in contestants.values():
            contestant.take_turn(vector, out, residual)
    for contestant in contestants.values():
        del contestant.times[0]  # the first touches its scratch memory for the first time
    return copies[1:], contestants


def add_options(parser: argparse.ArgumentParser) -> None:
    """How often."""
    parser.add_argument("--turns", type=int, default=15)


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a compressor."""
    torch.set_num_threads(1)
    copies, contestants = contest(options.turns)
    rows: list[Row] = []
    goals = []
    for text, contestant in contestants.items():
        parts = [statistics.median(each) * 1e3 for each in zip(*contestant.times, strict=True)]
        both = [encode + decode for encode, decode, _, _ in contestant.times]
        ratio = statistics.median(took / one for took, one in zip(both, copies, strict=True))
        speed = 100 * MB / statistics.median(both) / 1e9
        rows.append([text, contestant.compressor.reduction(LAYOUT), *parts, speed, ratio])
        if text in GOALS:
            goals.append(Goal(f"{text}: copies", ratio, GOALS[text]))
    note = f"a copy of as many bytes takes {statistics.median(copies) * 1e3:.1f} ms"
    yield Section(f"100 MB of float32, one core, {options.turns} turns", COLUMNS, rows, goals, [note])


COLUMNS = (
    Column("compressor"),
    Column("fewer bytes", "{:.1f}"),
    Column("encode ms", "{:.1f}"),
    Column("decode ms", "{:.1f}"),
    Column("adding ms", "{:.1f}"),
    Column("feedback ms", "{:.1f}"),
    Column("GB/s", "{:.2f}"),
    Column("× copy", "{:.2f}"),
)
