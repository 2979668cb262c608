"""`shoal sweep`: many runs of one script, each with settings of its own."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.jobs_verbs.submit import (
    Args,
    EngineOptions,
    Memory,
    On,
    Priority,
    QueueFolder,
    Retries,
    Script,
    Strategy,
    Time,
    Workers,
    check_settings,
    engine_of,
    sized,
)
from shoal.cli.run import run_options
from shoal.cli.status import plain
from shoal.cli.text_columns import columns
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.jobs.job import JobSpec
    from shoal.jobs.sweep.drive import Outcome, Sweep

CURVES = 5
"""So many of the best are drawn."""
Axes = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUES", help="As lr=1e-4,3e-4 or seed=0..4; every combination is a trial."
    ),
]
AtOnce = Annotated[int, typer.Option("--jobs", help="So many trials run at a time.")]
Metric = Annotated[str, typer.Option(help="What decides: loss, or a name given to run.log.")]
Mode = Annotated[Literal["min", "max"], typer.Option(help="Whether less or more of it is better.")]
Steps = Annotated[int, typer.Option(help="Of each whole run; 0: as the script says.")]
Halving = Annotated[
    int,
    typer.Option(metavar="N", help="After each round one of N goes on, with N times the steps."),
]
Folder = Annotated[Path, typer.Option(help="Where the trials and the result are; the same one goes on.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the trials, and stop.")]


def sweep(
    script: Script,
    args: Args = None,
    axes: Axes = [],  # noqa: B006  typer reads it, nobody changes it
    at_once: AtOnce = 1,
    metric: Metric = "loss",
    mode: Mode = "min",
    steps: Steps = 0,
    halving: Halving = 0,
    folder: Folder = Path("runs/sweep"),
    workers: Workers = "1",
    strategy: Strategy = "",
    priority: Priority = "normal",
    limit: Time = "",
    memory: Memory = "",
    retries: Retries = 0,
    on: On = "local",
    engine: EngineOptions = None,
    queue: QueueFolder = None,
    dry_run: DryRun = False,
) -> None:
    """Run a script with every combination of settings as jobs of a queue; a table, and the curves of the best.

    A key that `shoal.Run` has is its setting; any other goes to the script, as `--lr 1e-4`.

    \b
    shoal sweep train.py --set lr=1e-4,3e-4 --set seed=0..4 --jobs 4
    shoal sweep train.py --set lr=1e-4,3e-4,1e-3 --steps 90 --halving 3
    """
    if at_once < 1 or halving in (1,) or halving < 0 or steps < 0:
        raise ConfigError(f"--jobs {at_once} --halving {halving} --steps {steps}: at least 1, 2 and 1.")
    if halving and not steps:
        raise ConfigError(
            "--halving needs --steps: the steps of a whole run, of which the losers get a part."
        )
    check_settings(strategy, "", [])
    words = (*run_options(strategy, "", []), script, *(args or []))
    spec = dataclasses.replace(
        sized(words, workers, priority, limit, memory), retries=retries, engine=tuple(engine or ())
    )
    _go(_sweep_of(spec, axes, (folder, at_once, metric, mode, steps, halving)), on, queue, dry_run)


def _sweep_of(spec: JobSpec, axes: list[str], rest: tuple[Path, int, str, str, int, int]) -> Sweep:
    from shoal.jobs.sweep.drive import Sweep
    from shoal.jobs.sweep.grid import parse_axis, trials_of

    if not axes:
        raise ConfigError("there is nothing to try; give --set KEY=VALUES, as --set lr=1e-4,3e-4.")
    folder, at_once, metric, mode, steps, halving = rest
    trials = trials_of([parse_axis(text) for text in axes])
    names = _run_settings()
    for key in ("log", "checkpoint", "steps"):
        if any(key == name for name, _ in trials[0].settings):
            raise ConfigError(f"--set {key}: a sweep gives each trial its own; leave it out.")
    return Sweep(spec, trials, folder.absolute(), names, at_once, metric, mode, steps, halving)


def _run_settings() -> frozenset[str]:
    from shoal.train.run_config import settable  # with torch

    return frozenset(settable())


def _go(sweep: Sweep, on: str, queue: Path | None, dry_run: bool) -> None:
    from shoal.jobs import accept
    from shoal.jobs.job import check
    from shoal.jobs.sweep.drive import run_sweep
    from shoal.jobs.sweep.state import read_state

    engine = engine_of(on, queue)
    check(sweep.spec)
    accept(engine, on, sweep.spec_of(sweep.trials[0], sweep.rounds()[0]))
    if dry_run:
        for trial in sweep.trials:
            print(engine.describe(sweep.spec_of(trial, sweep.rounds()[0])))
        return
    asked = [on, *sweep.spec.command, *(trial.name for trial in sweep.trials), str(sweep.rounds())]
    state = read_state(sweep.folder, asked)
    try:
        outcome = run_sweep(
            sweep, engine, state, lambda said: print(f"shoal: {said}", file=sys.stderr, flush=True)
        )
    except KeyboardInterrupt:
        print(
            "shoal: the jobs go on; the same command waits for them, shoal cancel ends them.", file=sys.stderr
        )
        raise
    _show(sweep, outcome)


def _show(sweep: Sweep, outcome: Outcome) -> None:
    """A table of all, the curves of the best in the terminal, and as a picture where matplotlib is there."""
    from shoal.report.chart import draw, save_png

    best = outcome.best(sweep.mode)
    keys = [key for key, _ in sweep.trials[0].settings]
    settings = {trial.name: dict(trial.settings) for trial in sweep.trials}
    rows = [["", *keys, "steps", sweep.metric, "state"]]
    for place, name in enumerate(best, 1):
        reached = outcome.reached[name]
        value = "" if math.isnan(reached.value) else f"{reached.value:.6g}"
        own = [plain(settings[name][key], 40) for key in keys]
        rows.append([str(place), *own, str(reached.steps), value, outcome.states[name]])
    table = columns(rows, right=[0, len(keys) + 1, len(keys) + 2])
    print(table)
    (sweep.folder / "table.txt").write_text(table + "\n")
    curves = {
        name: outcome.reached[name].losses for name in best[:CURVES] if len(outcome.reached[name].losses) > 1
    }
    if curves:
        print(draw(curves, title="loss"))
        try:
            save_png(sweep.folder / "sweep.png", curves, "sweep")
        except ConfigError as error:
            print(f"shoal: no picture: {error}", file=sys.stderr)
    if any(state != "done" for state in outcome.states.values()):
        raise typer.Exit(1)
