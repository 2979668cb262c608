"""A worker is killed in the middle of a run: the launcher says so at once, and the run is finished all the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from shoal.cluster.local import Job
from shoal.cluster.recovery.supervise import run_job
from shoal.errors import WorkerFailed
from shoal.selftest.kinds import LOST_WORKER
from shoal.selftest.row import Row
from shoal.types import Value

SECONDS = 120.0
"""Of one run; it takes a few."""
WITHIN = 1e-9
SCRIPT = str(Path(__file__).with_name("lost_worker_script.py"))


@dataclass(frozen=True)
class Loss:
    """What becomes of a run under a strategy when a worker is lost."""

    strategy: str
    ends: bool
    """The launcher ends it, and it is started again from its checkpoint; else another worker takes the place."""

    @property
    def subject(self) -> str:
        how = "started again from its checkpoint" if self.ends else "another takes its place"
        return f"{self.strategy}: {how}"


LOSSES = (Loss("ddp", ends=True), Loss("ps(servers=1)", ends=False))


def subjects() -> list[str]:
    return [loss.subject for loss in LOSSES]


@dataclass(frozen=True)
class Outcome:
    """What a run has left behind."""

    first: int
    """The number of its first step."""
    weights: list[float]


@dataclass(frozen=True)
class LostWorker:
    """Runs in a folder of their own."""

    folder: Path
    device: str
    workers: int

    def check(self, subject: str) -> Row:
        """Kill one worker of a run, and compare what comes out with a run in which nobody is lost."""
        begun = perf_counter()
        loss = next(loss for loss in LOSSES if loss.subject == subject)
        if self.workers < 2:
            return Row(
                LOST_WORKER, subject, "left out", "one worker that is killed leaves nobody; use --workers 2."
            )
        try:
            good, said = self._compare(loss)
        except WorkerFailed as failed:
            good, said = False, f"the run ended: {failed}"
        return Row(LOST_WORKER, subject, "ok" if good else "failed", said, perf_counter() - begun)

    def _compare(self, loss: Loss) -> tuple[bool, str]:
        place = self.folder / loss.strategy.partition("(")[0]
        place.mkdir(parents=True)
        wanted = self._run(loss, place / "undisturbed", "")
        dead, noticed = place / "dead", 0.0
        if loss.ends:
            begun = perf_counter()
            try:
                self._run(loss, place / "killed", str(dead))
                return False, "a worker was killed, and the launcher has not said so"
            except WorkerFailed as failed:
                noticed, said = perf_counter() - begun, str(failed).partition("\n")[0]
            if "SIGKILL" not in said:
                return False, f"a worker was killed, and what the launcher said is: {said}"
        found = self._run(loss, place / "killed", str(dead))
        gap = max(abs(a - b) for a, b in zip(found.weights, wanted.weights, strict=True))
        if not dead.exists():
            return False, "no worker was killed"
        if gap > WITHIN:
            return False, f"its weights are {gap:.1e} from those of a run in which nobody was lost"
        if not loss.ends:
            return True, "went on, and ended with the same weights"
        how = f"named {noticed:.1f} s after the start; went on at step {found.first}"
        return True, f"{how} and ended with the same weights"

    def _run(self, loss: Loss, folder: Path, dies: str) -> Outcome:
        settings: dict[str, Value] = {"strategy": loss.strategy, "device": self.device}
        if loss.ends:
            settings |= {"checkpoint": str(folder), "checkpoint_every": 2}
        out = folder.with_suffix(".json")
        run_job(Job(SCRIPT, (str(out), dies), self.workers, settings, output="none", seconds=SECONDS))
        if not out.exists():
            raise WorkerFailed(f"it was not done after {SECONDS:.0f} s.")
        return Outcome(**json.loads(out.read_text()))
