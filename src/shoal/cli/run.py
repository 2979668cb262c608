"""`shoal run`: start a script in several workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cluster.dry_run import try_model
from shoal.cluster.local import Job, check, forkable_imports
from shoal.cluster.recovery.elastic import parse_workers
from shoal.cluster.recovery.retries import RETRIES
from shoal.cluster.recovery.supervise import run_job
from shoal.config import parse_value
from shoal.errors import ConfigError
from shoal.types import Value

Workers = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Workers on this host (2, or 1 on one core); 2:4 goes on with fewer where one keeps dying.",
        show_default=False,
    ),
]
HangLimit = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="After this a worker that hangs is taken for lost (10); 0: never."),
]
Retries = Annotated[
    int,
    typer.Option(help="Starts after a lost worker, in a row without progress; 0: its loss ends the run."),
]

Preparers = Annotated[
    int, typer.Option(help="Processes that make the parts of a PreparedStore beside the workers.")
]
Evaluators = Annotated[
    int, typer.Option(help="Processes that measure each checkpoint on validation= beside the workers.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run/--no-dry-run", help="Build a model that tpN or ppN divides in one process first."
    ),
]


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the script's Run."),
]
Threads = Annotated[int | None, typer.Option(help="Threads of each worker (an equal share of cores).")]
Shown = Annotated[
    Literal["first", "all"],
    typer.Option(help="Whose output is shown: the first worker's, or all with ranks."),
]
Hosts = Annotated[
    str,
    typer.Option(
        metavar="N|FILE",
        help="How many hosts take part, start this command on each; or a file of hosts, reached by ssh.",
    ),
]


def run(
    script: Annotated[str, typer.Argument(help="The Python file to run.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the script.", show_default=False)
    ] = None,
    workers: Workers = "",
    strategy: Annotated[str, typer.Option(help='How the work is shared, such as "zero1".')] = "",
    steps: Annotated[str, typer.Option(help="How long to train: 100, or 2ep for two epochs.")] = "",
    settings: Settings = None,
    threads: Threads = None,
    output: Shown = "first",
    hosts: Hosts = "1",
    host: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    at: Annotated[str, typer.Option(metavar="ADDRESS:PORT", help="Where host 0 can be reached.")] = "",
    hang_limit: HangLimit = None,
    retries: Retries = RETRIES,
    preparers: Preparers = 0,
    evaluators: Evaluators = 0,
    dry_run: DryRun = True,
    no_scout: Annotated[bool, typer.Option("--no-scout", hidden=True)] = False,
) -> None:
    """Run a script in several workers. No line of the script changes.

    \b
    shoal run --workers 4 train.py
    shoal run --workers 4 --strategy zero1 --steps 100 train.py --data corpus/
    shoal run --preparers 2 --evaluators 1 train.py
    shoal run --set clip=0.5 --set precision=bf16 train.py
    shoal run --hosts 2 --host 0 --at 10.0.0.1:29500 train.py    (and --host 1 on the other)
    shoal run --hosts hosts.txt --workers 4 train.py
    """
    least, most = parse_workers(workers) if workers else (0, default_workers())
    job = Job(
        script=script,
        args=tuple(args or ()),
        workers=most,
        least=least,
        overrides=overrides(strategy, steps, settings or []),
        threads=threads,
        output=output,
        hosts=int(hosts) if hosts.lstrip("-").isdigit() else 1,
        host=host,
        at=at,
        hang_limit=hang_limit,
        retries=retries,
        preparers=preparers,
        evaluators=evaluators,
    )
    if no_scout:
        typer.echo("shoal: --no-scout is now called --no-dry-run.", err=True)
    if hosts.lstrip("-").isdigit():
        refuse_early(job, dry_run and not no_scout)
        run_job(job)
    else:
        words = [*run_options(strategy, steps, settings or []), *launch_options(job)]
        _run_over_ssh(job, Path(hosts), words, dry_run and not no_scout)


def _run_over_ssh(job: Job, file: Path, words: Sequence[str], dry_run: bool) -> None:
    from shoal.cluster.over_ssh.hosts import read_hosts
    from shoal.cluster.over_ssh.start import RemoteJob, run_over_ssh

    if job.host:
        raise ConfigError(
            f"--host {job.host} beside a file of hosts: this command starts all of them; leave it out."
        )
    if job.preparers or job.evaluators:
        raise ConfigError(
            "--preparers and --evaluators run beside the workers of one host; leave out --hosts."
        )
    hosts = read_hosts(file)
    if len(hosts) == 1:
        raise ConfigError(f"--hosts {file} names one host; log in there and use shoal run without --hosts.")
    if job.least not in (0, job.workers):
        raise ConfigError(
            f"--workers {job.least}:{job.workers} is for one host; with --hosts give one number."
        )
    refuse_early(replace(job, workers=job.workers * len(hosts), at="", least=0), dry_run)
    run_over_ssh(RemoteJob(hosts, [*words, job.script, *job.args], job.at))


def run_options(strategy: str, steps: str, settings: Sequence[str]) -> list[str]:
    """The words of --strategy, --steps and --set, for another `shoal run`.

    >>> run_options("zero1", "", ["clip=0.5"])
    ['--strategy', 'zero1', '--set', 'clip=0.5']
    """
    given = [("--strategy", strategy), ("--steps", steps), *(("--set", setting) for setting in settings)]
    return [word for option, text in given if text for word in (option, text)]


def launch_options(job: Job) -> list[str]:
    """The words of what else each host is told.

    >>> launch_options(Job("train.py", workers=2, hang_limit=30.0))[:4]
    ['--workers', '2', '--hang-limit', '30.0']
    >>> launch_options(Job("train.py"))
    ['--workers', '1', '--retries', '0', '--output', 'first', '--no-dry-run']
    """
    numbers = {"--workers": job.workers, "--hang-limit": job.hang_limit, "--threads": job.threads}
    given = [
        word for option, number in numbers.items() if number is not None for word in (option, str(number))
    ]
    return [*given, "--retries", str(job.retries), "--output", job.output, "--no-dry-run"]


def refuse_early(job: Job, dry_run: bool = True) -> None:
    """Refuse what can be refused before the workers start; `dry_run`: what one process sees of the model too."""
    check(job)
    chosen = job.overrides.get("strategy")
    if chosen is not None:
        # The rules ask every exchange, and so import torch: only where there is something to check.
        with forkable_imports(job):
            from shoal.plan.automatic import automatic_options
            from shoal.plan.check import check_device, check_text

            if automatic_options(str(chosen)) is not None:
                return  # the workers choose
            plan = check_text(str(chosen), job.size)
            device = str(job.overrides.get("device", "auto"))
            # What "auto" finds is the workers' to say: who looks for cards cannot be forked any more.
            check_device(plan, "cpu" if device == "auto" else device)
    if dry_run:
        try_model(job)


def default_workers() -> int:
    """Two where there are two cores: enough to see that the script works in parallel."""
    return min(2, len(os.sched_getaffinity(0)))


def overrides(strategy: str, steps: str, settings: list[str]) -> dict[str, Value]:
    """What --strategy, --steps and --set say together.

    >>> overrides("zero1", "20", ["clip=0.5", "resume=false"])
    {'strategy': 'zero1', 'steps': 20, 'clip': 0.5, 'resume': False}
    """
    found: dict[str, Value] = {}
    if strategy:
        found["strategy"] = strategy
    if steps:
        found["steps"] = parse_value(steps)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting} is not KEY=VALUE; write it like --set clip=0.5.")
        if key in found:
            raise ConfigError(f"{key} is given twice; give it once, by its own option or by --set.")
        found[key] = parse_value(text)
    return found
