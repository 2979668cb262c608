"""Strategies between two hosts at several rates of the network, beside torch DDP and its hooks.

    scripts/bench network                   everything; about twenty minutes on two cores; takes root
    scripts/bench network --quick           a tiny model: whether it runs here
    scripts/bench network --rates 50mbit,500mbit --strategies "ddp, ddp + int8, local(16)" --parameters 60e6

Two network namespaces stand for hosts, on a cable that is limited to each rate. docs/guides/slow-networks.md says how
to read what it prints. Goals: at 100 Mb/s the best lossy strategy whose loss is at most 1 % above that of torch DDP is
6 times as fast, and `diloco(50) + int8` sends 150 times fewer bytes than `ddp`; `ddp + auto` is at most 2 % slower than
`ddp` at any rate. At the faster rates those two meet once more, for only many rounds tell them apart.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.network.contest import Settings, hold_contest
from benchmarks.network.contestants import BASELINE, PEERS, STRATEGIES, contestants
from benchmarks.network.measured import AtRate, Measured
from benchmarks.report.result import Column, Goal, Row, Section
from benchmarks.workload.rates import parse_rate, show_rate
from shoal.errors import ConfigError
from shoal.testing.hosts import make_hosts

RATE = 100_000_000
SPEED = 6.0
GAP = 0.01
"""The best lossy strategy: so many times the speed of torch DDP, with a loss not further above it than this."""
FEWER = 150.0
FEWEST = "diloco(50) + int8"
SLOWER = 1.02
ROUNDS = 20
"""Of `ddp + auto` beside `ddp`."""

_FULL = {"rates": "100mbit,1gbit,10gbit", "steps": 400, "parameters": 20e6, "small": 5e5, "rounds": 4}
_QUICK = {"rates": "100mbit,1gbit", "steps": 20, "parameters": 5e5, "small": 1e5, "rounds": 2}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is compared, and how large."""
    parser.add_argument("--rates", help="what the wire carries, with commas between (100mbit,1gbit,10gbit)")
    parser.add_argument("--strategies", help='only these, as in "ddp, ddp + int8, torch ddp fp16"')
    parser.add_argument(
        "--steps", type=int, help="steps after which losses are compared (400); 0: not at all"
    )
    parser.add_argument("--parameters", type=float, help="of the model whose steps are timed (20e6)")
    parser.add_argument("--small", type=float, help="parameters of the model whose losses are compared (5e5)")
    parser.add_argument("--rounds", type=int, help="turns of each contestant at each rate (4)")
    parser.add_argument("--batch", type=int, default=2, help="samples of a worker in each timed step")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps; no goal is held")
    parser.add_argument("--no-duel", action="store_true", help="do not let auto and ddp meet once more")


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """A table of each rate, one of losses, and the goals."""
    settings = settings_of(options)
    named = split_names(options.strategies) if options.strategies else [*PEERS, *STRATEGIES]
    found = _compare(named, settings)
    yield from sections(found, found.to_json())
    faster = tuple(rate for rate in settings.rates if rate > RATE)
    duel = None
    if faster and "ddp + auto" in found.names and not (options.no_duel or options.quick):
        again = Settings(faster, 0, settings.parameters, settings.small, ROUNDS, settings.batch)
        duel = _compare(["ddp", "ddp + auto"], again)
    goals = goals_of(found, duel)
    if goals:
        yield Section("between two hosts", goals=goals)


def settings_of(options: argparse.Namespace) -> Settings:
    """What was asked for; what was not, is as the size of the run has it."""
    default: dict[str, Any] = _QUICK if options.quick else _FULL

    def chosen(name: str, least: float) -> float:
        given = getattr(options, name)
        value = float(default[name] if given is None else given)
        if not least <= value < float("inf"):
            raise ConfigError(f"--{name} {value:g}: it must be at least {least:g}.")
        return value

    return Settings(
        rates=tuple(parse_rate(rate) for rate in str(options.rates or default["rates"]).split(",")),
        steps=int(chosen("steps", least=0)),
        parameters=chosen("parameters", least=3e4),
        small=chosen("small", least=3e4),
        rounds=int(chosen("rounds", least=1)),
        batch=int(chosen("batch", least=1)),
    )


def split_names(text: str) -> list[str]:
    """Names between commas; those within brackets belong to a name.

    >>> split_names("ddp + topk(0.01, feedback=false), local(16)")
    ['ddp + topk(0.01, feedback=false)', 'local(16)']
    """
    return [name.strip() for name in re.split(r",(?![^(]*\))", text) if name.strip()]


def _compare(names: Sequence[str], settings: Settings) -> Measured:
    entered = contestants(names)
    with make_hosts(2) as hosts:
        found = hold_contest(hosts, entered, settings, _progress())
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr)
    return found


def _progress() -> Callable[[str], None]:
    """A line that tells where it is: one that changes in a terminal, one after the other elsewhere."""
    start = time.monotonic()
    terminal = sys.stderr.isatty()

    def say(what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - start), 60)
        line = f"{minutes:>3}:{seconds:02} {what}"
        print(f"\r\x1b[2K{line[:100]}" if terminal else line, end="" if terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    return say


def sections(found: Measured, raw: object = None) -> Iterator[Section]:
    """A table of step times and bytes for each rate, and one of losses."""
    about = found.settings
    said = (
        f"2 hosts of 1 worker, {about['timed_parameters'] / 1e6:.1f} M parameters, {about['timed_batch']} samples of "
        f"64 bytes a worker; {about['rounds']} rounds"
    )
    for at in found.rates:
        probed = f"the wire carried {at.probed / 1e6:.0f} Mb/s when asked for more"
        title = f"{show_rate(at.rate)}: step time"
        yield Section(title, TIMES, _times(found, at), notes=[said, probed, *at.said], raw=raw)
        raw = None  # once is enough
    failed = [f"{name} did not take part to the end: {reason}" for name, reason in found.failed.items()]
    if found.learned:
        title = (
            f"loss after {about['steps']} steps on the same samples "
            f"({about['learning_parameters'] / 1e6:.1f} M parameters)"
        )
        times = [Column(f"time at {show_rate(at.rate)}", "seconds") for at in found.rates]
        yield Section(title, [*LOSSES, *times], _losses(found), notes=[found.note, *failed], raw=raw)
    elif failed:
        yield Section("left out", notes=failed)


TIMES = (
    Column("contestant"),
    Column("step", "seconds"),
    Column(f"speed, {BASELINE} = 1", "{:.2f} ×"),
    Column("MB sent a step", "{:.3f}"),
    Column("times fewer", "{:.1f} ×"),
    Column("steps"),
)
LOSSES = (Column("contestant"), Column("unseen text", "{:.4f}"), Column(f"above {BASELINE}", "{:+.2%}"))


def _times(found: Measured, at: AtRate) -> list[Row]:
    plain = at.timed[BASELINE].step_bytes
    return [
        [
            name,
            timed.step_seconds,
            at.speed(name),
            timed.step_bytes / 1e6,
            plain / timed.step_bytes if timed.step_bytes else None,
            timed.steps,
        ]
        for name in found.names
        if (timed := at.timed.get(name)) is not None
    ]


def _losses(found: Measured) -> list[Row]:
    return [
        [
            name,
            learned.final,
            found.gap(name),
            *(
                len(learned.losses) * at.timed[name].step_seconds if name in at.timed else None
                for at in found.rates
            ),
        ]
        for name in found.names
        if (learned := found.learned.get(name)) is not None
    ]


def best_lossy(found: Measured, at: AtRate) -> tuple[str, float]:
    """Of our strategies whose loss is near enough, the fastest; those that lose nothing are not fast here."""
    near = [name for name in found.learned if name in at.timed and found.gap(name) <= GAP]
    ours = [(name, at.speed(name)) for name in near if not name.startswith(BASELINE)]
    return max(ours, key=lambda pair: pair[1], default=("nobody", 0.0))


def goals_of(found: Measured, duel: Measured | None) -> list[Goal]:
    """Those whose contestants were there."""
    goals = []
    for at in found.rates:
        if at.rate == RATE and found.learned:
            name, speed = best_lossy(found, at)
            what = f"{show_rate(RATE)}: speed of {name} / {BASELINE}, at most {GAP:.0%} above its loss"
            goals.append(Goal(what, speed, SPEED, least=True))
        if at.rate == RATE and {"ddp", FEWEST} <= at.timed.keys():
            ratio = at.timed["ddp"].step_bytes / at.timed[FEWEST].step_bytes
            goals.append(Goal(f"{show_rate(RATE)}: bytes of ddp / {FEWEST}", ratio, FEWER, least=True))
    met_again = {at.rate: at for at in duel.rates} if duel is not None else {}
    for at in found.rates:
        here = met_again.get(at.rate, at)
        if {"ddp", "ddp + auto"} <= here.timed.keys():
            ratio = here.slowdown("ddp + auto", "ddp")
            goals.append(Goal(f"{show_rate(at.rate)}: step time of ddp + auto / ddp", ratio, SLOWER))
    return goals
