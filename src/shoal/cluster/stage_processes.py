"""Preparers and evaluators: processes that run the job's script beside its workers, and whose loss changes nothing.

They are started again where they die, whatever happens to the workers meanwhile. When the workers are done, preparers
are ended, and evaluators may finish the checkpoints that wait.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from shoal.cluster import report, worker
from shoal.cluster.local import Job, StartProcess
from shoal.cluster.output import open_streams, tail
from shoal.cluster.process_state import cpu_ticks
from shoal.cluster.watch import Crew, Interrupts, say
from shoal.world.launch import Stages

_OVER = "over"


@dataclass
class StageProcess:
    """One place of a stage, and who has it now."""

    role: str
    number: int
    folder: str
    pid: int = 0
    """0: nobody, and nobody will."""
    descriptor: int = -1
    starts: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


class StageProcesses:
    """All of a job on this host."""

    def __init__(self, job: Job, folder: str, interrupts: Interrupts) -> None:
        """`folder`: the job's private one; it outlives the workers of one start."""
        self._job = job
        self._interrupts = interrupts
        self._over = Path(folder) / _OVER
        self._crew: Crew | None = None
        self._start_process: StartProcess | None = None
        self._kept: list[int] = []
        places = [("preparer", n) for n in range(job.preparers)] + [
            ("evaluator", n) for n in range(job.evaluators)
        ]
        self._places = [StageProcess(role, n, os.path.join(folder, f"{role}-{n}")) for role, n in places]
        for place in self._places:
            os.makedirs(place.folder)

    def environment(self) -> Mapping[str, str]:
        """What workers are told."""
        if not self._places:
            return {}
        said = Stages(self._job.preparers, self._job.evaluators, str(self._over))
        return {"SHOAL_STAGES": json.dumps(asdict(said))}

    def enter(self, crew: Crew, start_process: StartProcess) -> None:
        """Workers have been started: so are those who work beside them, and `crew` hears of their ends."""
        self._crew = crew
        self._start_process = start_process
        for place in self._places:
            if not place.starts:
                self._start(place)
            elif place.pid:
                crew.attend(place.descriptor, partial(self._reap, place))

    def leave(self) -> None:
        """The workers of this start have ended."""
        if self._crew is not None:
            for place in self._places:
                if place.pid:
                    self._crew.forget(place.descriptor)
        self._crew = None

    def finish(self) -> None:
        """The workers are done: wait until evaluators have nothing left to do, or do not move."""
        self._over.touch()
        self._end([place for place in self._places if place.role == "preparer"])
        ticks = {place.pid: (-1, time.monotonic()) for place in self._places}
        while (left := [place for place in self._places if place.pid]) and not self._interrupts.received:
            descriptors = [place.descriptor for place in left]
            ready = select.select([*descriptors, self._interrupts.descriptors[0]], [], [], 1.0)[0]
            if self._interrupts.descriptors[0] in ready:
                self._interrupts.collect()
            for place in left:
                now, moved = cpu_ticks(place.pid), time.monotonic()
                before, since = ticks.get(place.pid, (-1, moved))
                ticks[place.pid] = (now, moved) if now != before else (before, since)
                if place.descriptor in ready:
                    self._reap(place)
                elif self._job.hang_limit and moved - since > self._job.hang_limit:
                    say(f"{place.name} has not moved for {moved - since:.0f} s; it is ended.")
                    self._end([place])

    def close(self) -> None:
        """End those that are still there."""
        self._end(self._places)

    def _start(self, place: StageProcess) -> None:
        assert self._crew is not None
        assert self._start_process is not None
        job = self._job
        place.starts.append(time.monotonic())
        environment = {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
            "SHOAL_RENDEZVOUS": "",
            "SHOAL_OVERRIDES": json.dumps({**job.overrides, "strategy": "solo"}),
            "OMP_NUM_THREADS": str(job.threads or os.environ.get("OMP_NUM_THREADS") or 1),
            **self.environment(),
            "SHOAL_ROLE": f"{place.role} {place.number}",
            **job.environment,
        }
        script = str(Path(job.script).absolute())
        task = worker.Task(0, script, job.args, environment, place.folder, os.getpid())
        streams = open_streams("none", place.folder, 0, first=False)
        kept = [one.descriptor for one in self._places if one.pid]
        try:
            with self._interrupts.held():
                place.pid = self._start_process(task, streams, [*self._crew.descriptors, *kept])
        finally:
            streams.close()
        place.descriptor = os.pidfd_open(place.pid)
        self._crew.attend(place.descriptor, partial(self._reap, place))

    def _reap(self, place: StageProcess) -> None:
        """A process has ended: start another in its place, unless it was done or that is in vain."""
        if self._crew is not None:
            self._crew.forget(place.descriptor)
        os.close(place.descriptor)
        pid = place.pid
        place.pid = 0
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0 or self._interrupts.received:
            return
        said = report.read(place.folder, 0)
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else "failed"
        if said is not None:
            why = f"failed: {said.message}"
        elif code > 0 and (lines := tail(place.folder, 0)):
            why = f"failed: {lines.splitlines()[-1]}"
        recent = [at for at in place.starts if time.monotonic() - at < worker.AGAIN_SECONDS]
        if self._crew is None:
            say(f"{place.name} {why}; what it had left to do is not done.")
        elif (said is not None and said.kind == "config") or len(recent) >= worker.AGAIN_TIMES:
            say(f"{place.name} {why.rstrip('.')}; training goes on without it.")
        else:
            say(f"{place.name} {why.rstrip('.')}; another takes its place.")
            self._start(place)

    def _end(self, places: list[StageProcess]) -> None:
        for place in places:
            if place.pid:
                os.kill(place.pid, signal.SIGKILL)  # what they leave half-made counts for nothing
                if self._crew is not None:
                    self._crew.forget(place.descriptor)
                os.close(place.descriptor)
                os.waitpid(place.pid, 0)
                place.pid = 0
