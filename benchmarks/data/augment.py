"""How many images, signals and texts a second one core augments.

    scripts/bench augment

Rows are 3 × 32 × 32 images, signals of one second at 16 kHz, and texts of 128 tokens, in batches of 256 (signals: 64);
processor seconds of one core, median of seven. Goal: 10,000 images a second with every chain of images.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.report.result import Column, Goal, Row, Section
from shoal.data.augment import make_chain
from shoal.data.augment.sample_draws import keys_of

GOAL = 10_000
ROUNDS = 7
IMAGES = (
    "crop(4) & flip",
    "affine(10) & flip & erase(0.1)",
    "affine(15, scale=0.1, shift=0.1, fill=reflection) & gain(2) & flip & erase(0.1)",
    "crop(4) & flip & mixup(0.2, classes=10)",
    "crop(4) & flip & cutmix(1.0, classes=10)",
)
SIGNALS = ("gain(6) & shift(0.1) & mask(0.2)", "noise(0.01)")
TEXTS = ("mask(0.15, token=103, keep=101/102/0)", "swap(0.1) & delete(0.1)")


def rate(text: str, rows: torch.Tensor) -> float:
    """Rows a second of one core's time; a mixing chain gets the partners' rows among the others, as in one process."""
    chain = make_chain(text)
    assert chain is not None
    keys = keys_of(np.arange(len(rows)), samples=1 << 40, seed=0, epoch=0)
    labels, partners = torch.arange(len(rows)) % 10, np.roll(np.arange(len(rows)), 1)
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        keys = keys_of(np.arange(len(rows)), samples=1 << 40, seed=0, epoch=0)
        chain.batch((rows, labels), keys, partners)
        found.append(len(rows) / (time.thread_time() - began))
    return statistics.median(found)


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""
    del parser


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """One row a chain."""
    del options
    torch.set_num_threads(1)
    kinds = (
        ("3 × 32 × 32 images", torch.rand(256, 3, 32, 32), IMAGES),
        ("signals of 16,000", torch.randn(64, 16_000), SIGNALS),
        ("texts of 128 tokens", torch.randint(1, 30_000, (256, 128)), TEXTS),
    )
    rows: list[Row] = [[kind, text, rate(text, data)] for kind, data, chains in kinds for text in chains]
    goals = [
        Goal(f"images a second: {row[1]}", float(str(row[2])), GOAL, least=True)
        for row in rows[: len(IMAGES)]
    ]
    yield Section(
        "augmentation on one core",
        [Column("rows"), Column("augment="), Column("a second", "{:,.0f}")],
        rows,
        goals,
    )
