"""`shoal plan`: what a step would take under every strategy, before anything is trained."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.plan_verb.paper import plan_paper, show_replay
from shoal.cli.plan_verb.review import show_review
from shoal.cli.run import default_workers, overrides
from shoal.cluster.local import Job, check
from shoal.cluster.recovery.supervise import run_job
from shoal.errors import ConfigError

MOST_NEIGHBOURS = 8
"""Workers that profile at the same time; for more, the cores are shared on paper."""


Script = Annotated[str | None, typer.Argument(help="The Python file to plan for.", show_default=False)]
Args = Annotated[list[str] | None, typer.Argument(help="Passed on to the script.", show_default=False)]
Workers = Annotated[int | None, typer.Option(help="Workers over all hosts (2).")]
Hosts = Annotated[int, typer.Option(help="Hosts that the workers are on.")]
Net = Annotated[str, typer.Option(help="Bandwidth between hosts, such as 10Gb/s.")]
Memory = Annotated[str, typer.Option(help="What a worker may take, such as 8GB (its share of what is free).")]
Batch = Annotated[int, typer.Option(help="Samples of a step (what the script says).")]
Exact = Annotated[bool, typer.Option("--exact", help="Only plans that equal one process.")]
Only = Annotated[list[str] | None, typer.Option(help="Only this strategy; may be repeated.")]
Everything = Annotated[bool, typer.Option("--all", help="Every plan, not the best of each kind.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plot = Annotated[str, typer.Option(help="Draw a PNG there.")]
Sweep = Annotated[str, typer.Option(help="Curves over numbers of workers: workers=1..64.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the script's Run."),
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine (anew), 20 s if it is idle.")
]
Review = Annotated[str, typer.Option(metavar="RUN", help="Compare a run's log with what was predicted.")]
ClusterFile = Annotated[str, typer.Option(help="A TOML file that describes other machines.")]
GptText = Annotated[str, typer.Option(help="A transformer as layers=96,hidden=12288,heads=96,seq=2048.")]
Precision = Annotated[str, typer.Option(help="With --gpt: bf16, fp8 or fp4.")]
Replay = Annotated[str, typer.Option(metavar="FILE", help="Predict published runs in a JSON file.")]


def plan(
    script: Script = None,
    args: Args = None,
    workers: Workers = None,
    hosts: Hosts = 1,
    net: Net = "",
    memory: Memory = "",
    global_batch: Batch = 0,
    exact: Exact = False,
    strategy: Only = None,
    everything: Everything = False,
    as_json: AsJson = False,
    plot: Plot = "",
    sweep: Sweep = "",
    settings: Settings = None,
    calibrate: Calibrate = False,
    review: Review = "",
    cluster: ClusterFile = "",
    gpt: GptText = "",
    precision: Precision = "bf16",
    replay: Replay = "",
) -> None:
    """Predict step time and memory of every strategy, and say which to take and why.

    \b
    shoal plan train.py --workers 4
    shoal plan train.py --workers 8 --hosts 2 --net 10Gb/s --memory 8GB --exact
    shoal plan train.py --sweep workers=1..64
    shoal plan --gpt layers=96,hidden=12288,heads=96,seq=2048 --cluster cluster.toml --global-batch 1536
    """
    if replay:
        show_replay(Path(replay), as_json)
        return
    if review:
        show_review(Path(review))
        return
    if gpt:
        plan_paper(gpt, cluster, global_batch, precision, as_json, everything)
        return
    count = default_workers() if workers is None else workers
    _check_numbers(count, hosts, global_batch)
    here = min(math.ceil(count / hosts), MOST_NEIGHBOURS)
    if script is None:
        _machine_alone(here, calibrate)
        return
    check(Job(script))
    question = _question(
        count, hosts, net, memory, exact, strategy, everything, as_json, plot, sweep, cluster
    )
    here = 1 if cluster else measure_machine(here, anew=calibrate)
    chosen = overrides("", "", settings or [])
    chosen |= {"global_batch": global_batch} if global_batch else {}
    job = Job(
        script,
        tuple(args or ()),
        here,
        {**chosen, "strategy": "ddp"},
        environment={"SHOAL_DRY_RUN": question},
    )
    run_job(job)


def _machine_alone(workers: int, asked: bool) -> None:
    """`shoal plan --calibrate` without a script."""
    if not asked:
        raise ConfigError("shoal plan needs a script, or one of --gpt, --replay, --review and --calibrate.")
    measure_machine(workers, anew=True)
    _tell_machine(workers)


def _question(
    workers: int,
    hosts: int,
    net: str,
    memory: str,
    exact: bool,
    only: list[str] | None,
    everything: bool,
    as_json: bool,
    plot: str,
    sweep: str,
    cluster: str,
) -> str:
    """What is asked of the workers that profile."""
    from shoal.plan.paper.cluster import parse_amount, read_cluster
    from shoal.plan.sweep import parse_sweep
    from shoal.train.planning.request import Request

    if cluster:
        read_cluster(Path(cluster))  # refused here, in one sentence
    if plot and not plot.endswith(".png"):
        raise ConfigError(f"--plot {plot}: give a name that ends in .png.")
    return Request(
        workers,
        hosts,
        parse_amount(net, "--net") if net else 0.0,
        parse_amount(memory, "--memory") if memory else 0.0,
        exact,
        tuple(only or ()),
        everything,
        as_json,
        plot and str(Path(plot).absolute()),
        parse_sweep(sweep) if sweep else (),
        cluster and str(Path(cluster).absolute()),
    ).question()


def _check_numbers(workers: int, hosts: int, batch: int) -> None:
    for name, value in (("--workers", workers), ("--hosts", hosts)):
        if value < 1:
            raise ConfigError(f"{name} {value} is too few; it must be at least 1.")
    if batch < 0:
        raise ConfigError(f"--global-batch {batch}: give a number above 0.")
    if workers % hosts:
        raise ConfigError(
            f"{workers} workers cannot be on {hosts} hosts in equal numbers; use a multiple of {hosts}."
        )


def measure_machine(workers: int, anew: bool) -> int:
    """Measure this machine with so many workers, once; their number."""
    from shoal.plan.cache import recall
    from shoal.plan.machine import Machine
    from shoal.train.planning import calibrate_worker

    known = Machine.from_json(
        recall(calibrate_worker.TABLES, calibrate_worker.key_of(workers)).get("machine")
    )
    if known is not None and not anew:
        return workers
    typer.echo(f"shoal: measuring this machine with {workers} workers, once (about 20 s)", err=True)
    run_job(Job(str(Path(calibrate_worker.__file__)), (), workers, output="first"))
    return workers


def _tell_machine(workers: int) -> None:
    from shoal.train.planning.answer_plan import machine_of

    made = machine_of(workers)
    typer.echo(f"{workers} workers on {made.cores} cores, {made.flops / 1e9:.1f} GFLOP/s each")
    for name, rows in made.added.items():
        found = ", ".join(f"{row.parameters / 1e6:.1f} MB {row.seconds.middle * 1e3:+.2f} ms" for row in rows)
        typer.echo(f"{name:12} adds {found}")
    typer.echo(f"kept in {os.path.dirname(str(_file()))}")


def _file() -> Path:
    from shoal.plan.cache import cache_file
    from shoal.train.planning.calibrate_worker import TABLES

    return cache_file(TABLES)
