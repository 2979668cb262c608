"""`shoal submit`: hand a script to a queue. `shoal reserve`: set a part of this host aside."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.run import Settings, default_workers, overrides, run_options
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.jobs import Engine
    from shoal.jobs.job import JobSpec

On = Annotated[str, typer.Option("--on", help="Which engine runs it: `shoal list engine`.")]
QueueFolder = Annotated[
    Path | None,
    typer.Option("--queue", help="Where the local queue is kept (a folder of this user and host)."),
]
Time = Annotated[str, typer.Option("--time", help="After this it is stopped, as 2h or 90min.")]
Memory = Annotated[str, typer.Option(help="Of the whole job, set aside for it, as 16GB.")]
Priority = Annotated[str, typer.Option(help="low, normal, high, or a number.")]
Workers = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX", help="All start at once or none (2, or 1 on one core).", show_default=False
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="KEY=VALUE", help="What this engine alone knows, as partition=debug."),
]


Script = Annotated[str, typer.Argument(help="The Python file to run.", show_default=False)]
Args = Annotated[
    list[str] | None, typer.Argument(help="Passed on to the script; after --.", show_default=False)
]
Cores = Annotated[int, typer.Option(help="Of each worker.")]
Devices = Annotated[int, typer.Option(help="Cards of each worker.")]
Hosts = Annotated[int, typer.Option(help="Among which the workers are divided.")]
After = Annotated[
    list[str] | None, typer.Option("--after", metavar="JOB", help="Start when this one has ended well.")
]
Retries = Annotated[int, typer.Option(help="Starts after it has failed.")]
Preemptible = Annotated[
    bool,
    typer.Option("--preemptible/--not-preemptible", help="May save, and make way for a higher priority."),
]
ReservationName = Annotated[str, typer.Option(help="Use what `shoal reserve` has set aside.")]
Account = Annotated[str, typer.Option(help="In whose share it counts (the user's name).")]
Name = Annotated[str, typer.Option(help="Shown by `shoal jobs` (the script's name).")]
Strategy = Annotated[str, typer.Option(help='How the work is shared, such as "zero1".')]
Steps = Annotated[str, typer.Option(help="How long to train: 100, or 2ep for two epochs.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what the engine would be given, and stop.")]


def submit(
    script: Script,
    args: Args = None,
    workers: Workers = "",
    priority: Priority = "normal",
    limit: Time = "",
    memory: Memory = "",
    cores: Cores = 1,
    devices: Devices = 0,
    hosts: Hosts = 1,
    after: After = None,
    retries: Retries = 0,
    preemptible: Preemptible = True,
    reservation: ReservationName = "",
    account: Account = "",
    name: Name = "",
    strategy: Strategy = "",
    steps: Steps = "",
    settings: Settings = None,
    on: On = "local",
    engine: EngineOptions = None,
    queue: QueueFolder = None,
    dry_run: DryRun = False,
) -> None:
    """Put a script into a queue: it runs when its turn comes, and starts again where it was lost.

    \b
    shoal submit train.py --workers 2 --time 2h --memory 4GB
    shoal submit train.py --priority high --after 12 -- --data corpus/
    """
    check_settings(strategy, steps, settings or [])
    words = (*run_options(strategy, steps, settings or []), script, *(args or []))
    spec = sized(words, workers, priority, limit, memory)
    spec = replace(
        spec,
        cores=cores,
        devices=devices,
        hosts=hosts,
        after=tuple(after or ()),
        retries=retries,
        preemptible=preemptible,
        reservation=reservation,
        account=account,
        name=name or Path(script).stem,
        engine=tuple(engine or ()),
    )
    hand_over(spec, on, engine_of(on, queue), dry_run)


def check_settings(strategy: str, steps: str, settings: list[str]) -> None:
    """Refuse what `shoal run` would refuse at once, before anything waits in a queue for it."""
    found = overrides(strategy, steps, settings)
    if not str(found.get("strategy", "auto")).startswith("auto"):
        from shoal.config import parse_strategy

        parse_strategy(str(found["strategy"]))


def sized(words: tuple[str, ...], workers: str, priority: str, limit: str, memory: str) -> JobSpec:
    """The command, and how much it takes."""
    from shoal.jobs.job import JobSpec, parse_memory, parse_priority, parse_time, parse_width

    least, most = parse_width(workers) if workers else (default_workers(), default_workers())
    return JobSpec(
        words,
        least=least,
        most=most,
        memory=parse_memory(memory) if memory else 0,
        seconds=parse_time(limit) if limit else None,
        priority=parse_priority(priority),
        folder=os.getcwd(),
    )


def hand_over(spec: JobSpec, on: str, engine: Engine, dry_run: bool) -> None:
    """Refuse what cannot run; else submit it, and say how to see it."""
    from shoal.jobs import DEFAULT, accept
    from shoal.jobs.job import check

    check(spec)
    accept(engine, on, spec)
    if dry_run:
        print(engine.describe(spec))
        return
    job = engine.submit(spec)
    shown = job if on == DEFAULT else f"{on}:{job}"
    print(f"job {shown} is in the queue; shoal logs {shown} -f shows its output.")


def engine_of(name: str, queue: Path | None) -> Engine:
    """The engine of that name; `queue`: where the local one keeps its jobs."""
    from shoal.jobs import TABLE
    from shoal.jobs.local.engine import Local

    made = TABLE.look_up(name)
    if queue is not None and made is not Local:
        raise ConfigError(f"--queue is for --on local; {name} keeps its own queue.")
    return Local(queue.absolute()) if queue is not None else made()


def reserve(
    name: Annotated[str, typer.Argument(help="By which jobs ask for it.", show_default=False)],
    begin: Annotated[str, typer.Option("--from", help="now, 18:00, or 2026-11-20T18:00.")] = "now",
    limit: Annotated[str, typer.Option("--time", help="For how long, as 2h.")] = "1h",
    cores: Annotated[int, typer.Option(help="Of this host.")] = 0,
    memory: Annotated[str, typer.Option(help="As 16GB.")] = "",
    devices: Annotated[int, typer.Option(help="Cards.")] = 0,
    queue: QueueFolder = None,
) -> None:
    """Set cores, memory or cards of this host aside for jobs that name them.

    \b
    shoal reserve class --from 18:00 --time 2h --cores 4
    shoal submit train.py --reservation class --time 30min
    """
    from shoal.jobs.job import parse_memory, parse_time
    from shoal.jobs.local.engine import Local
    from shoal.jobs.local.state import Reservation

    start = moment(begin, time.time())
    amount = (cores, parse_memory(memory) if memory else 0, devices)
    if min(amount) < 0 or not any(amount):
        raise ConfigError("a reservation needs --cores, --memory or --devices above 0.")
    engine = Local(queue.absolute()) if queue is not None else Local()
    engine.reserve(Reservation(name, amount, start, start + parse_time(limit)))
    print(f"reservation {name}: from {datetime.fromtimestamp(start):%Y-%m-%d %H:%M} for {limit}.")


def moment(text: str, now: float) -> float:
    """A time of day, today or tomorrow, or a whole date.

    >>> moment("now", 5.0)
    5.0
    """
    if text == "now":
        return now
    try:
        today = datetime.fromtimestamp(now)
        if len(text) == 5:
            found = datetime.combine(today.date(), datetime.strptime(text, "%H:%M").time())
            return (found if found >= today else found + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"--from {text} is no moment; write now, 18:00 or 2026-11-20T18:00.") from None
