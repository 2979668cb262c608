"""The parameter server: what a step costs, how fast values move, and what its clocks gain when workers are slow.

    scripts/bench server                        all of it, about eight minutes on two cores
    scripts/bench server step                   a training step beside `ddp` and beside compute alone
    scripts/bench server push                   gradients there and values back, beside torch RPC and Ray
    scripts/bench server stragglers             slow workers under bsp, ssp and asp
    scripts/bench server fetch                  values that come during the next forward pass
    scripts/bench server first                  first values of a job on several hosts
    scripts/bench server pause                  how long `kill -9` of a server holds up the work

Each part is a file of its own, which says what it measures and its goals.

Servers and coordinator are processes of their own. Contestants take turns step by step in the same processes, and a
ratio is the median of the ratios of the turns: load from elsewhere then meets both alike. `work` is what all cores
together did for a contestant; on a machine with other work it says more than the time does, for there a contestant of
more processes is given more of the cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.report.result import Section
from benchmarks.server import fetch, first, pause, push, step, stragglers

PARTS = {
    "step": (step.measure, 16),
    "push": (push.measure, 20),
    "stragglers": (stragglers.measure, 2),
    "fetch": (fetch.measure, 12),
    "first": (first.measure, 3),
    "pause": (pause.measure, 5),
}
"""What measures it, and how many turns each contestant has if nothing else is said."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which parts, and how long."""
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; all if none is named")
    parser.add_argument("--turns", type=int, default=0, help="how often each contestant has its turn")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """All sections of the parts asked for."""
    if unknown := set(options.parts) - set(PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in options.parts or PARTS:
        act, turns = PARTS[name]
        for section in act(options.turns or turns):
            yield replace(section, part=name)
