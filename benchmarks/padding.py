"""How much padding micro-batches need, with length buckets and without.

    python benchmarks/padding.py

Lengths are log-normal with a long tail, as those of texts are: 180 tokens on average, at most 1024. Every micro-batch
is padded to its longest sample. Ends with exit code 1 if buckets of the default window need more than 5 % padding.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from shoal.data.feed import Feed
from shoal.data.picks import Picks
from shoal.partition import make_partition

GOAL = 0.05
SAMPLES, BATCH, PARTS = 100_000, 256, 8
CHOICES = ("block", "bucket(length, window=1)", "bucket(length, window=8)", "bucket(length)")


def make_lengths() -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(4.87, 0.8, SAMPLES)
    return np.clip(drawn, 4, 1024).astype(np.int64)


def measure(lengths: np.ndarray, text: str) -> tuple[float, float, float]:
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


def main() -> int:
    """Print one line a choice; 1 if the default bucket misses the goal."""
    lengths = make_lengths()
    print(
        f"{SAMPLES:,} samples of {lengths.mean():.0f} tokens on average, {lengths.max()} at most; "
        f"global batch {BATCH} in {PARTS} micro-batches"
    )
    print(f"{'partition':26}  {'padding':>8}  {'neighbours':>10}  {'µs a step':>9}")
    for text in CHOICES:
        share, alike, took = measure(lengths, text)
        print(f"{text:26}  {share:8.2%}  {alike:10.2f}  {took * 1e6:9.0f}")
    print(f"{'ok  ' if share <= GOAL else 'MISS'} padding with {text} = {share:.2%} (goal {GOAL:.0%})")
    return int(share > GOAL)


if __name__ == "__main__":
    sys.exit(main())
