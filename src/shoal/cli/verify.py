"""`shoal verify`: does a strategy compute what one process computes, on the user's own script?

The script runs twice, in float64 so that rounding cannot hide a mistake: once in one process that computes the
same micro-batches one after the other, once under the strategy. Each run writes down the loss, the mean gradient and
the new parameters of every step, and the two are compared number by number. Of strategies that do not promise equal
numbers, the mean losses are compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.run import default_workers, overrides, refuse_early
from shoal.cluster.local import Job, run_job
from shoal.errors import ConfigError, VerifyFailed
from shoal.types import Promise

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
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        asked = overrides(strategy, str(steps), [f"precision={precision}", *(settings or [])])
        many = _job(script, args, count, asked, Path(folder) / "many", stands_for=1)
        refuse_early(many)
        label = f"{strategy or 'the script'} with {count} workers"
        _run(many, f"running {steps} steps: {label} ...")
        told = Path(folder) / "many" / "stands_for"
        parts = int(told.read_text()) if told.exists() else count
        alone = {**asked, "strategy": "solo"}
        _run(
            _job(script, args, 1, alone, Path(folder) / "one", stands_for=parts),
            f"running {steps} steps: one process ...",
        )
        promise = Promise[(Path(folder) / "many" / "promise").read_text()]
        if promise is Promise.EXACT:
            print(_verdict(Path(folder), label, precision, allowed))
        else:
            print(_near(Path(folder), label, promise, _NEAR[promise] if tolerance is None else tolerance))


def _run(job: Job, message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    run_job(job)


def _job(
    script: str,
    args: list[str] | None,
    workers: int,
    settings: dict[str, int | float | bool | str],
    folder: Path,
    stands_for: int,
) -> Job:
    folder.mkdir()
    environment = {"SHOAL_RECORD": str(folder), "SHOAL_STANDS_FOR": str(stands_for)}
    return Job(script, tuple(args or ()), workers, settings, output="none", environment=environment)


@dataclass(frozen=True)
class Difference:
    """How far two numbers, or the largest of two tensors of numbers, are apart."""

    step: int
    what: str
    absolute: float
    relative: float


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
    worst, steps = Difference(0, "nothing", 0.0, 0.0), 0
    wrong: list[Difference] = []  # the first, and the first parameter of that step if the first is the loss
    for difference in compare(folder / "one", folder / "many"):
        if wrong and (difference.step > wrong[0].step or wrong[-1].what != "the loss"):
            break
        steps = max(steps, difference.step)
        if not difference.relative <= allowed:
            wrong.append(difference)
        worst = max(worst, difference, key=lambda d: d.relative)
    if wrong:
        said = ", then ".join(f"{d.what} by {d.absolute:.3g} ({d.relative:.3g} relative)" for d in wrong)
        raise VerifyFailed(
            f"DIFFERS: {label} does not equal one process: first at step {wrong[0].step}, {said}; "
            f"{allowed:g} is allowed in {precision}."
        )
    if steps == 0:
        raise VerifyFailed("nothing to compare: the script made no step; does it loop over run.steps(...)?")
    gap = f"largest difference {worst.relative:.1e} relative ({worst.what}, step {worst.step})"
    return (
        f"EQUAL: {label} computes what one process computes: {steps} steps in {precision}, losses, gradients and "
        f"parameters; {gap if worst.relative else 'not one bit differs'}."
    )


def compare(one: Path, many: Path) -> Iterator[Difference]:
    """Every loss, gradient and parameter of two recorded runs, in the order they were computed."""
    from safetensors.torch import load_file

    # Steps that were dropped (overflow in fp16) leave nothing behind, so numbers may be missing.
    files = [file.name for folder in (one, many) for file in folder.glob("*.loss.json")]
    for step in sorted({int(name.split(".")[0]) for name in files}):
        for folder in (one, many):
            if not (folder / f"{step}.parameters.safetensors").exists():
                raise VerifyFailed(f"DIFFERS: only one of the two runs made step {step + 1}.")
        a, b = (json.loads((folder / f"{step}.loss.json").read_text()) for folder in (one, many))
        yield Difference(step + 1, "the loss", abs(a - b), abs(a - b) / max(abs(a), 1e-12))
        for kind in ("gradients", "parameters"):
            left, right = (load_file(folder / f"{step}.{kind}.safetensors") for folder in (one, many))
            # Numbers far below the largest of their kind are the rest of a cancellation: rounding is all they hold.
            floor = (
                1e-4 * max((float(t.abs().max()) for t in left.values() if t.numel()), default=1.0) + 1e-30
            )
            for name in sorted(left.keys() | right.keys()):
                what = f"{kind.removesuffix('s')} of '{name}'"
                if name not in left or name not in right:
                    yield Difference(step + 1, f"{what} is missing in one run", float("inf"), float("inf"))
                elif left[name].numel():
                    gap = float((left[name] - right[name]).abs().max())
                    yield Difference(step + 1, what, gap, gap / max(float(left[name].abs().max()), floor))
