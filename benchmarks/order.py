"""How fast the global order gives sample ids, and what it costs to begin in the middle of an epoch.

    python benchmarks/order.py

Ends with exit code 1 if any size gives fewer than 10 million ids per second on one core.
"""

from __future__ import annotations

import sys
import time

from shoal.data.order import GlobalOrder

LEAST_IDS_PER_SECOND = 10e6
SIZES = (10**6, 10**8, 2**29 + 1, 10**9, 10**12)
"""2**29 + 1 is where a domain of whole bits would be nearly twice too large."""
COUNT = 1_000_000
BATCH = 256


def ids_per_second(order: GlobalOrder) -> float:
    """The best of five runs over the last million positions of an epoch."""
    best = float("inf")
    for epoch in range(5):
        began = time.perf_counter()
        order.ids(epoch, order.num_samples - COUNT, order.num_samples)
        best = min(best, time.perf_counter() - began)
    return COUNT / best


def seek_seconds(order: GlobalOrder) -> float:
    """The mean time of one batch at scattered places of scattered epochs."""
    places = [(order.num_samples - BATCH) * number // 99 for number in range(100)]
    began = time.perf_counter()
    for epoch, place in enumerate(places):
        order.ids(epoch, place, place + BATCH)
    return (time.perf_counter() - began) / len(places)


def main() -> int:
    """Print one line a size; 1 if any is too slow."""
    slowest = float("inf")
    print(f"{'samples':>17}  {'million ids/s':>13}  {f'seek + {BATCH} ids':>15}")
    for size in SIZES:
        order = GlobalOrder(size, seed=0)
        speed = ids_per_second(order)
        slowest = min(slowest, speed)
        print(f"{size:17,}  {speed / 1e6:13.1f}  {seek_seconds(order) * 1e6:12.0f} µs")
    return int(slowest < LEAST_IDS_PER_SECOND)


if __name__ == "__main__":
    sys.exit(main())
