"""`shoal selftest`: does Shoal do on this machine, and on its cards, what its tests promise?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

import typer

from shoal.cli.run import default_workers
from shoal.cli.text_columns import columns
from shoal.errors import ConfigError, SelftestFailed
from shoal.selftest.drive import Request, examine
from shoal.selftest.kinds import KINDS
from shoal.selftest.report import failures, table_rows, verdict, write


def selftest(
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Where workers compute; auto: on cards, if there are any."),
    ] = "auto",
    workers: Annotated[
        int | None, typer.Option(help="Workers on this host (as many as there are cards, or 2).")
    ] = None,
    hosts: Annotated[int, typer.Option(help="How many hosts take part; start this command on each.")] = 1,
    host: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    at: Annotated[str, typer.Option(metavar="ADDRESS:PORT", help="Where host 0 can be reached.")] = "",
    only: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help=f"Some kinds of check: {', '.join(KINDS)}.")
    ] = None,
    report: Annotated[Path, typer.Option(help="The file to attach to a report.")] = Path(
        "shoal-selftest.json"
    ),
) -> None:
    """Try everything that fits this machine, in about two minutes: one table, one verdict, one file to attach.

    \b
    shoal selftest
    shoal selftest --device cuda --workers 4
    shoal selftest --hosts 2 --host 0 --at 10.0.0.1:29500    (and --host 1 on the other)
    """
    if not report.parent.is_dir():
        raise ConfigError(
            f"--report {report}: there is no folder {report.parent}; give a file in one that exists."
        )
    request = Request(device, workers, hosts, host, at, tuple(only or KINDS))
    begun = perf_counter()
    with tempfile.TemporaryDirectory(prefix="shoal-selftest-") as folder:
        found = examine(request, Path(folder), default_workers())
    seconds = perf_counter() - begun
    if host > 0:
        print(f"host {host} is done; host 0 has the table.")
        return
    print(columns(table_rows(found.rows)))
    write(report, found, seconds)
    print(f"\n{verdict(found, seconds)}\nAll numbers are in {report}; attach it to a report.")
    bad = failures(found.rows)
    if bad:
        raise SelftestFailed(f"{len(bad)} checks failed, first {bad[0].key}: {bad[0].said}")
