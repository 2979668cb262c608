"""How much padding micro-batches need, with length buckets and without.

    scripts/bench padding

Lengths are log-normal with a long tail, as those of texts are: 180 tokens on average, at most 1024. Every micro-batch
is padded to its longest sample. `neighbours` is how much the mean lengths of a batch and the next go together (their
correlation). Goal: buckets of the default window need at most 5 % padding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.report.result import Column, Goal, Row, Section
from shoal.data.feed import Feed
from shoal.data.picks import Picks
from shoal.partition import make_partition

GOAL = 0.05
SAMPLES, BATCH, PARTS = 100_000, 256, 8
CHOICES = ("block", "bucket(length, window=1)", "bucket(length, window=8)", "bucket(length)")


def make_lengths() -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(4.87, 0.8, SAMPLES)
    return np.clip(drawn, 4, 1024).astype(np.int64)


def try_partition(lengths: np.ndarray, text: str) -> tuple[float, float, float]:
    """The share of padding in an epoch, how alike neighbouring batches are, and seconds a step to pick its samples."""
    feed = Feed(lengths, BATCH, 0, 1, PARTS, partition=make_partition(text), columns={"length": lengths})
    picks = Picks(feed)
    real = padded = 0
    means = []
    began = time.perf_counter()
    steps = [picks.of(step) for step in range(picks.track.per_epoch)]
    took = (time.perf_counter() - began) / len(steps)
    for _, _, parts, _ in steps:
        found = [lengths[ids] for ids in parts if len(ids)]
        real += sum(int(some.sum()) for some in found)
        padded += sum(int(some.max()) * len(some) for some in found)
        means.append(np.concatenate(found).mean())
    return 1 - real / padded, float(np.corrcoef(means[:-1], means[1:])[0, 1]), took


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""
    del parser


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a choice."""
    del options
    lengths = make_lengths()
    title = (
        f"{SAMPLES:,} samples of {lengths.mean():.0f} tokens on average, {lengths.max()} at most; "
        f"global batch {BATCH} in {PARTS} micro-batches"
    )
    columns = [
        Column("partition"),
        Column("padding", "{:.2%}"),
        Column("neighbours", "{:.2f}"),
        Column("µs a step", "{:.0f}"),
    ]
    rows: list[Row] = []
    for text in CHOICES:
        share, alike, took = try_partition(lengths, text)
        rows.append([text, share, alike, took * 1e6])
    yield Section(title, columns, rows, [Goal(f"padding with {text}", share, GOAL)])
