"""`shoal doctor`: what is wrong with this machine, or between several, before training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shoal.cli.run import default_workers
from shoal.doctor.drive import examine
from shoal.doctor.finding import Request
from shoal.doctor.report import as_json, draw, verdict
from shoal.errors import FaultsFound

WIDTH = 120
"""Where no terminal says how wide it is."""


def doctor(
    workers: Annotated[
        int | None, typer.Option(help="Workers that this host will have (as of `shoal run`).")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where checkpoints will be.")] = Path("runs"),
    hosts: Annotated[int, typer.Option(help="How many hosts take part; start this command on each.")] = 1,
    host: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    at: Annotated[str, typer.Option(metavar="ADDRESS:PORT", help="Where host 0 can be reached.")] = "",
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long hosts wait for each other.")
    ] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Name what is wrong before training: one table, one verdict; exit code 1 if something has to be repaired.

    \b
    shoal doctor
    shoal doctor --workers 8 --folder /data/runs
    shoal doctor --hosts 2 --host 0 --at 10.0.0.1:29500    (and --host 1 on the other)
    """
    request = Request(default_workers() if workers is None else workers, folder, hosts, host, at, wait)
    found = examine(request)
    if found is None:
        print(f"host {host} has answered; host 0 has the table.")
        return
    if json:
        print(as_json(found))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", WIDTH)))
        draw(found, console)
        print(f"\n{verdict(found)}")
    sys.stdout.flush()
    if found.faults:
        first = found.faults[0]
        where = f" on host {first.host}" if hosts > 1 else ""
        raise FaultsFound(f"the first fault, {first.check}{where}: {first.what}; {first.remedy}.")
