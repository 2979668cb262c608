"""`shoal verify`: does a strategy compute what one process computes, on the user's own script?

The script runs three times, in float64 so that rounding cannot hide a mistake: under the strategy, in one process that
computes the same micro-batches one after the other, and in one process that computes each batch at once. Each run
writes down the loss, the mean gradient and the new parameters of every step. The first two are compared number by
number; of strategies that do not promise equal numbers, the mean losses are. The last two show whether the program
depends on how a batch is cut (`whole_batch.py`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.compare_runs import compare_runs
from shoal.cli.run import default_workers, overrides, refuse_early
from shoal.cli.whole_batch import Facts, Runs, compare_with_whole
from shoal.errors import ConfigError, VerifyFailed
from shoal.types import Promise
from shoal.world.private_folder import private_folder

_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
_NEAR = {Promise.CLOSE: 0.05, Promise.CONVERGES: 0.2}
"""How far mean losses may be apart where equal numbers are not promised."""


def verify(
    script: Annotated[str, typer.Argument(help="The Python file to verify.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the script.", show_default=False)
    ] = None,
    strategy: Annotated[
        str, typer.Option(help='What to verify, such as "zero2"; default: what the script says.')
    ] = "",
    workers: Annotated[int | None, typer.Option(help="Workers under the strategy (2).")] = None,
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 5,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a setting of the script's Run, in both runs."
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="fp64 shows mistakes apart from rounding.")] = "fp64",
    tolerance: Annotated[float | None, typer.Option(help="Largest relative difference allowed.")] = None,
) -> None:
    """Run a script in one process and under a strategy, and name the first number that differs.

    \b
    shoal verify train.py --strategy zero2 --workers 4
    """
    count = default_workers() if workers is None else workers
    if precision not in _TOLERANCE:
        raise ConfigError(f"--precision {precision}: it is one of {', '.join(_TOLERANCE)}.")
    if steps < 1:
        raise ConfigError(f"--steps {steps}: compare at least 1 step.")
    allowed = _TOLERANCE[precision] if tolerance is None else tolerance
    asked = overrides(strategy, str(steps), [f"precision={precision}", *(settings or [])])
    label = f"{strategy or 'the script'} with {count} workers"
    with private_folder("shoal-verify-") as private:
        folder = Path(private.path)
        runs = Runs(folder, script, tuple(args or ()), count, asked, label)
        refuse_early(runs.job("many", folder))
        parts = runs.start("many")
        facts = Facts.of(runs.folder / "many")
        promise = Promise[(runs.folder / "many" / "promise").read_text()]
        if (
            facts.gathers and facts.restless
        ):  # one process has the whole batch at once, and would draw once for all
            runs = runs.again("still", still=True)
            parts = runs.start("many")
        runs.start("one", parts)
        if promise is Promise.EXACT:
            said = _verdict(runs.folder, label, precision, allowed)
        else:
            said = _near(runs.folder, label, promise, _NEAR[promise] if tolerance is None else tolerance)
            allowed = 0.0  # what was allowed is for mean losses
        for note in compare_with_whole(runs, facts, parts, precision, allowed):
            print(note, file=sys.stderr)
        print(said)


def _near(folder: Path, label: str, promise: Promise, allowed: float) -> str:
    """For strategies that do not promise the same numbers: how the losses compare, step by step and in the mean."""
    one, many = ([_loss(file) for file in _losses(folder / name)] for name in ("one", "many"))
    if not one or not many:
        raise VerifyFailed("nothing to compare: the script made no step; does it loop over run.steps(...)?")
    means = sum(one) / len(one), sum(many) / len(many)
    gap = abs(means[1] - means[0]) / max(abs(means[0]), 1e-12)
    said = (
        f"{label} promises no equal numbers ({promise.value}): its mean loss over {len(many)} steps is {means[1]:.6g}, "
        f"and {means[0]:.6g} in one process, {gap:.2g} relative; {allowed:g} is allowed."
    )
    if not gap <= allowed:
        raise VerifyFailed(f"DIFFERS: mean losses are too far apart: {said}")
    return f"{promise.name}: {said}"


def _losses(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.loss.json"), key=lambda file: int(file.name.split(".")[0]))


def _loss(file: Path) -> float:
    return float(json.loads(file.read_text()))


def _verdict(folder: Path, label: str, precision: str, allowed: float) -> str:
    found = compare_runs(folder / "one", folder / "many", allowed)
    if found.wrong:
        raise VerifyFailed(
            f"DIFFERS: {label} does not equal one process: first at step {found.wrong[0].step}, {found.said}; "
            f"{allowed:g} is allowed in {precision}."
        )
    if found.steps == 0:
        raise VerifyFailed("nothing to compare: the script made no step; does it loop over run.steps(...)?")
    worst = found.worst
    gap = f"largest difference {worst.relative:.1e} relative ({worst.what}, step {worst.step})"
    return (
        f"EQUAL: {label} computes what one process computes: {found.steps} steps in {precision}, losses, gradients and "
        f"parameters; {gap if worst.relative else 'not one bit differs'}."
    )
