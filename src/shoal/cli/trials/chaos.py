"""`shoal chaos`: faults on purpose, from a seed, against a script of your own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shoal.chaos.drive import Outcome, Request, disturb
from shoal.chaos.job import NEVER, Command
from shoal.chaos.report import draw, verdict
from shoal.chaos.schedule import Schedule
from shoal.cli.run import default_workers
from shoal.errors import ChaosFound, ConfigError

WIDTH = 120
PORT = 29533


def chaos(
    script: Annotated[str, typer.Argument(help="The Python file to run.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the script.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the schedule: the same one gives the same faults.")] = 0,
    kills: Annotated[int, typer.Option(help="Workers that are killed (SIGKILL).")] = 0,
    stops: Annotated[int, typer.Option(help="Workers that are stopped for a while (SIGSTOP).")] = 0,
    delays: Annotated[int, typer.Option(help="Workers that are slowed down for a while.")] = 0,
    restarts: Annotated[int, typer.Option(help="The launcher is killed, and started again.")] = 0,
    fulls: Annotated[int, typer.Option(help="The disk of checkpoints is full for a while (root).")] = 0,
    cuts: Annotated[int, typer.Option(help="The link between two hosts is down for a while (root).")] = 0,
    schedule: Annotated[Path | None, typer.Option(help="Replay this, in place of --seed.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers, on each host (2, or 1 on one core).")] = None,
    strategy: Annotated[str, typer.Option(help='How the work is shared, such as "zero1".')] = "",
    steps: Annotated[str, typer.Option(help="How long to train: 100, or 2ep for two epochs.")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the script's Run."),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; only the last is saved if left out.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where both runs keep their files.")] = Path("runs/chaos"),
) -> None:
    """Kill, stop and slow down workers of a script on a schedule, then check that nothing was lost or left behind.

    \b
    shoal chaos train.py --seed 7 --kills 20
    shoal chaos --workers 4 --strategy zero3 --kills 5 --stops 2 --steps 200 train.py
    shoal chaos --schedule runs/chaos/seed-7/schedule.json train.py
    """
    counts = {"kill": kills, "stop": stops, "delay": delays, "restart": restarts, "full": fulls, "cut": cuts}
    given = _read(schedule) if schedule is not None else None
    if given is not None:
        counts = {kind: sum(fault.kind == kind for fault in given.faults) for kind in counts}
    if not sum(counts.values()) or min(counts.values()) < 0:
        raise ConfigError("there is nothing to do: give --kills 5, or another kind of fault.")
    command = Command(
        script=script,
        args=tuple(args or ()),
        options=_options(strategy, steps, settings or []),
        workers=default_workers() if workers is None else workers,
        checkpoint_every=NEVER if checkpoint_every is None else checkpoint_every,
        full_disks=counts["full"] > 0,
        hosts=2 if counts["cut"] else 1,
        at=f"10.77.0.1:{PORT}" if counts["cut"] else "",
    )
    _tell(disturb(Request(command, counts, seed, folder.absolute(), given)), folder)


def _options(strategy: str, steps: str, settings: list[str]) -> tuple[str, ...]:
    """Those that go to `shoal run` as they are."""
    named = [*(["--strategy", strategy] if strategy else []), *(["--steps", steps] if steps else [])]
    return (*named, *(word for setting in settings for word in ("--set", setting)))


def _read(file: Path) -> Schedule:
    try:
        return Schedule.from_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--schedule {file} cannot be read ({error}).") from None


def _tell(outcome: Outcome, folder: Path) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", WIDTH)))
    draw(outcome, console)
    where = folder / f"seed-{outcome.schedule.seed}"
    print(f"\n{verdict(outcome)}\nSchedule, result and output are in {where}.", flush=True)
    bad = [row for row in outcome.rows if not row.good]
    if bad:
        raise ChaosFound(f"the run was disturbed for good: {bad[0].name}: {bad[0].said}")
