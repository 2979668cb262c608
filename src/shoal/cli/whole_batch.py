"""The plain program, for `shoal verify`: does one process that computes each batch at once get the same numbers?

The reference of `verify` cuts each batch as the workers do, so that dropout and batch normalisation see the same. A
loss that is not a sum over samples is then wrong on both sides. So the script runs once more with whole batches. Where
layers draw, normalise or follow statistics, both run in evaluation mode, in which they do not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cli.compare_runs import Comparison, compare_runs
from shoal.cluster.local import Job
from shoal.cluster.recovery.supervise import run_job
from shoal.errors import VerifyFailed, WorkerFailed
from shoal.types import Value

_ALLOWED = {"fp64": 1e-7, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Sums over a whole batch round in another order than sums over its parts; steps carry that on."""


@dataclass(frozen=True)
class Facts:
    """What a recorded run has found out about its program."""

    draws: bool = False
    """Whether the model or the loss drew random numbers in the first step."""
    collate_draws: bool = False
    """Whether the collate function draws."""
    batchnorm: tuple[str, ...] = ()
    """Layers that normalise over a batch."""
    moves: tuple[str, ...] = ()
    """Other buffers that training has changed."""
    gathers: bool = False
    """Whether the loss sees rows of all workers."""
    parts: int = 1
    """Micro-batches of a step."""
    finding: str = ""
    """Why the loss does not split, as far as its first step has shown."""

    @staticmethod
    def of(folder: Path) -> Facts:
        """As the run in `folder` has written them down; as if nothing was found where it made no step."""
        file = folder / "facts.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        lists = {key: tuple(found.get(key, ())) for key in ("batchnorm", "moves")}
        return Facts(**{**found, **lists})

    @property
    def restless(self) -> bool:
        """Whether layers do something once for each micro-batch."""
        return self.draws or bool(self.batchnorm) or bool(self.moves)


@dataclass(frozen=True)
class Runs:
    """Recorded runs of one script, each in a folder of its own inside `folder`."""

    folder: Path
    script: str
    args: tuple[str, ...]
    workers: int
    asked: Mapping[str, Value]
    label: str
    still: bool = False
    """Whether the model trains in evaluation mode."""

    def again(self, name: str, still: bool) -> Runs:
        """The same script, in a folder beside the others; runs start from the same weights there."""
        folder = self.folder / name
        folder.mkdir()
        first = self.folder / "initial.safetensors"
        if first.exists():
            (folder / first.name).write_bytes(first.read_bytes())
        return replace(self, folder=folder, still=still)

    def start(self, name: str, parts: int = 1) -> int:
        """Run it; returns how many micro-batches one process has to compute for each that the script asks for.

        many: under the strategy. one: in one process, each batch in `parts`. whole: in one process, each at once.
        """
        folder = self.folder / name
        folder.mkdir()
        what = {"many": self.label, "one": "one process", "whole": "one process, each batch at once"}[name]
        mode = " in evaluation mode" if self.still else ""
        print(f"running {self.asked['steps']} steps: {what}{mode} ...", file=sys.stderr, flush=True)
        run_job(self.job(name, folder, parts))
        told = folder / "stands_for"
        return 1 if Facts.of(folder).gathers else int(told.read_text()) if told.exists() else self.workers

    def job(self, name: str, folder: Path, parts: int = 1) -> Job:
        """What `start` starts."""
        settings, workers = dict(self.asked), self.workers
        if name != "many":
            settings["strategy"] = "solo"
            workers = 1
        if name == "whole":
            settings["accumulate"] = 1
        environment = {"SHOAL_RECORD": str(folder), "SHOAL_STANDS_FOR": str(parts)}
        if self.still:
            environment["SHOAL_STILL"] = "1"
        return Job(self.script, self.args, workers, settings, output="none", environment=environment)


def compare_with_whole(runs: Runs, facts: Facts, parts: int, precision: str, allowed: float) -> Iterator[str]:
    """What is to be said of the program with whole batches; raises VerifyFailed if the loss depends on the cut."""
    one = Facts.of(runs.folder / "one")
    yield from _legitimate(facts, one.parts)
    if one.parts == 1:
        return  # it was the plain program
    try:
        if facts.restless and not runs.still:
            runs = runs.again("still", still=True)
            runs.start("one", parts)
        runs.start("whole")
    except WorkerFailed as failed:
        yield f"not compared with whole batches: in that run the script ended with exit code {failed.exit_code}."
        return
    found = compare_runs(runs.folder / "whole", runs.folder / "one", max(allowed, _ALLOWED[precision]))
    if not found.wrong:
        return
    last = Facts.of(runs.folder / "whole")
    if last.draws or last.collate_draws or last.moves:
        what = "collate=" if last.collate_draws else "the program, in evaluation mode too,"
        how = (
            "changes its buffers"
            if last.moves and not (last.draws or last.collate_draws)
            else "draws random numbers"
        )
        yield f"not compared with whole batches: {what} {how} once for each micro-batch."
        return
    raise VerifyFailed(_verdict(found, runs, one.parts, last))


def _legitimate(facts: Facts, parts: int) -> Iterator[str]:
    """What depends on the cut by its nature, and is left out of the comparison."""
    if parts > 1 and facts.batchnorm:
        layers = ", ".join(f"'{name}'" for name in facts.batchnorm[:5]) + (
            ", ..." if facts.batchnorm[5:] else ""
        )
        yield (
            f"batch normalisation ({layers}) measures each of {parts} micro-batches by itself, so numbers depend on "
            "how many there are; batchnorm='sync' measures the samples of all workers. Compared with whole batches in "
            "evaluation mode."
        )
    elif parts > 1 and facts.restless:
        what = "random numbers are drawn" if facts.draws else f"'{facts.moves[0]}' changes"
        yield f"{what} once for each of {parts} micro-batches; compared with whole batches in evaluation mode."


def _verdict(found: Comparison, runs: Runs, parts: int, whole: Facts) -> str:
    losses = [json.loads((runs.folder / name / "0.loss.json").read_text()) for name in ("whole", "one")]
    why = whole.finding or (
        "Something in the model or in the loss looks at other samples than its own, at the size of the batch, or at "
        "the weights: return (sum, count), let a loss see all samples with run.gather, give a penalty as penalty=."
    )
    return (
        f"DIFFERS: the program depends on how a batch is cut: one process that computes each batch at once and one "
        f"that cuts it in {parts}, as {runs.label} does, differ first at step {found.wrong[0].step}, {found.said} "
        f"(the first loss is {losses[0]:.6g} and {losses[1]:.6g}). {why}"
    )
