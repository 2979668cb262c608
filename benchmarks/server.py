"""The parameter server: what a step costs, how fast values move, and what its clocks gain when workers are slow.

    scripts/bench server                        all of it, about eight minutes on two cores
    scripts/bench server step                   a training step beside `ddp` and beside compute alone
    scripts/bench server push                   gradients there and values back, beside torch RPC and Ray (push.py)
    scripts/bench server stragglers             slow workers under bsp, ssp and asp (stragglers.py)
    scripts/bench server fetch                  values that come during the next forward pass (fetch.py)
    scripts/bench server first                  first values of a job on several hosts (first.py)
    scripts/bench server pause                  how long `kill -9` of a server holds up the work (pause.py)

Servers and coordinator are processes of their own. Contestants take turns step by step in the same processes, and a
ratio is the median of the ratios of the turns: load from elsewhere then meets both alike. `work` is what all cores
together did for a contestant; on a machine with other work it says more than the time does, for there a contestant of
more processes is given more of the cores.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from attended import Attended
from exchange import CONTEXT, Case, Stepper, Transformer, adamw, make_parts, torch_loop

from shoal.testing.spawn import spawn
from shoal.train.step import run_step
from shoal.world.world import World

Goal = tuple[str, str, float]
"""A contestant, another, and how many times the other's time it may take at most."""
STEP_GOALS: list[Goal] = [
    ("ps(bsp)", "ddp", 1.3),
    ("ps(bsp)", "ps(bsp, replicas=1)", 1.3),
]
MANY = 10**6
"""More steps than anybody makes: so the ledger is asked once how far to go, as in a run."""


@dataclass
class Seen:
    """What a contestant took in each turn, in seconds."""

    wall: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    """Of all cores, for this process and the contestant's servers."""


def take_turns(
    makers: Mapping[str, Callable[[], None]],
    turns: int,
    servers: Mapping[str, Sequence[int]],
    meet: Callable[[], None] = lambda: None,
    rounds: int = 1,
) -> dict[str, Seen]:
    """Measure every contestant in every turn, after two that do not count. `servers`: which processes work for it.

    `rounds`: so many times in a row, after a pause, so that work left over from one round meets the next of the same
    contestant; what is seen is of one.
    """
    seen = {name: Seen() for name in makers}
    gc.disable()
    for turn in range(turns + 2):
        for name in list(makers) if turn % 2 == 0 else list(reversed(makers)):
            pids = [os.getpid(), *servers.get(name, ())]
            time.sleep(0.05 if rounds > 1 else 0.0)
            meet()
            start, worked = time.perf_counter(), work_of(pids)
            for _ in range(rounds):
                makers[name]()
            meet()  # it is over when the slowest worker is
            if turn >= 2:
                seen[name].wall.append((time.perf_counter() - start) / rounds)
                seen[name].work.append((work_of(pids) - worked) / rounds)
        gc.collect()
    gc.enable()
    return seen


def work_of(pids: Sequence[int]) -> float:
    """Seconds that cores have worked for some processes."""
    return sum(
        time.clock_gettime(~pid << 3 | 2) for pid in pids
    )  # clock_getcpuclockid(3), which Python lacks


def ratio_of(seen: Mapping[str, Seen], mine: str, theirs: str) -> float:
    """The median over the turns of how many times the other's time a contestant took."""
    return statistics.median(a / b for a, b in zip(seen[mine].wall, seen[theirs].wall, strict=True))


def table(title: str, seen: Mapping[str, Seen], beside: str) -> None:
    """Medians and quartiles, and the ratio to one of them."""
    print(f"\n{title}")
    print(
        f"{'contestant':<26} {'median ms':>10} {'quartiles':>17} {'/ ' + beside:>9} {'work ms':>9} {'/ ' + beside:>9}"
    )
    works = {name: statistics.median(times.work) * 1e3 for name, times in seen.items()}
    for name, times in seen.items():
        low, middle, high = (value * 1e3 for value in statistics.quantiles(times.wall, n=4))
        wall = f"{middle:>10.1f} {f'{low:.1f}..{high:.1f}':>17} {ratio_of(seen, name, beside):>9.3f}"
        print(f"{name:<26} {wall} {works[name]:>9.1f} {works[name] / works[beside]:>9.3f}")


def judge(seen: Mapping[str, Seen], goals: list[Goal]) -> int:
    """Print each ratio beside its goal; how many are missed."""
    missed = 0
    for mine, theirs, most in goals:
        if mine in seen and theirs in seen:
            missed += verdict(f"{mine} / {theirs}", ratio_of(seen, mine, theirs), most)
    return missed


def verdict(what: str, found: float, goal: float, least: bool = False) -> bool:
    """Say whether a goal is kept; True if it is missed."""
    good = found >= goal if least else found <= goal
    print(
        f"  {'ok    ' if good else 'missed'} {what} = {found:.3f} (goal: at {'least' if least else 'most'} {goal:g})",
        flush=True,
    )
    return not good


def compute(world: World, case: Case) -> Stepper:
    """The same step with no communication at all."""
    model = Transformer(512, 5)
    return torch_loop(world, case, model, adamw(list(model.parameters())))


def one_after_the_other(world: World, case: Case, strategy: str) -> Callable[[], None]:
    """A step of Shoal each time it is called."""
    parts, number = make_parts(world, case, strategy), 0

    def step() -> None:
        nonlocal number
        claimed = parts.exchange.claim(number, MANY)
        assert claimed == number, f"step {claimed} was handed out, {number} is next"
        run_step(parts, number)
        number += 1

    return step


def contest(
    world: World, case: Case, strategies: dict[str, str], servers: dict[str, list[int]]
) -> dict[str, Seen]:
    torch.set_num_threads(1)
    alone = compute(world, case)
    makers: dict[str, Callable[[], None]] = {"compute": lambda: alone(0)}
    for name, strategy in strategies.items():
        makers[name] = one_after_the_other(world, case, strategy)
    servers = servers if world.rank == 0 else {}  # count them once
    return take_turns(makers, case.rounds, servers, world.barrier)


def step(turns: int) -> int:
    """A training step of the 20 M transformer."""
    case = Case("20M", 8, turns, 1, ())
    with Attended() as one, Attended() as two:
        strategies = {
            "ddp": "ddp",
            "ps(bsp, replicas=1)": f"ps(bsp, replicas=1, {one.options})",
            "ps(bsp)": f"ps(bsp, {two.options})",
        }
        servers = {"ps(bsp, replicas=1)": one.pids, "ps(bsp)": two.pids}
        first, second = spawn(contest, 2, case, strategies, servers, timeout=1800)
    for name, times in first.items():
        times.work = [a + b for a, b in zip(times.work, second[name].work, strict=True)]
    table(f"a step: 20 M parameters, 2 workers, batch 8×{CONTEXT} a worker, 2 servers", first, "ddp")
    return judge(first, STEP_GOALS)


def main() -> None:
    import fetch
    import first
    import pause
    import push
    import stragglers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = {
        "step": step,
        "push": push.measure,
        "stragglers": stragglers.measure,
        "fetch": fetch.measure,
        "first": first.measure,
        "pause": pause.measure,
    }
    parser.add_argument(
        "sections", nargs="*", metavar="section", help=f"{', '.join(sections)}; all if none is named"
    )
    parser.add_argument("--turns", type=int, default=0, help="how often each contestant has its turn")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(sections):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    usual = {"step": 16, "push": 20, "stragglers": 2, "fetch": 12, "first": 3, "pause": 5}
    missed = sum(sections[name](args.turns or usual[name]) for name in args.sections or sections)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
