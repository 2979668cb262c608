"""What an engine is to Shoal: something that takes a job, lists jobs, shows their output and ends them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from shoal.errors import ConfigError
from shoal.jobs.job import JobSpec

STATES = ("waiting", "running", "stopping", "done", "failed", "cancelled")
"""What a job can be, for every engine; the last three are ends."""
ENDS = STATES[3:]

OPTIONS = {
    "cores": "--cores",
    "devices": "--devices",
    "memory": "--memory",
    "seconds": "--time",
    "priority": "--priority",
    "after": "--after",
    "retries": "--retries",
    "preemptible": "--not-preemptible",
    "reservation": "--reservation",
    "account": "--account",
    "hosts": "--hosts",
    "least": "--workers MIN:MAX",
    "engine": "--engine",
}
"""How people ask for a field of `JobSpec`."""


@dataclass(frozen=True)
class JobState:
    """A job as its engine sees it."""

    id: str
    name: str
    state: str
    """One of STATES."""
    workers: int
    """That it has while it runs, that it asks for otherwise."""
    priority: str = ""
    seconds: float = 0.0
    """That it has run for."""
    why: str = ""
    """Why it waits, has failed or starts again; a sentence, or a part of one."""
    code: int | None = None
    """The exit code, once it has ended."""


class Engine(ABC):
    """One way to have jobs run. A choice of the slot has no state besides its options."""

    summary: ClassVar[str]
    """One line for `shoal list`."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Fields of `JobSpec` that this engine cannot do, and why or what to use in their place."""

    @abstractmethod
    def refuse(self, spec: JobSpec) -> None:
        """Raise ConfigError, in one sentence, for what this engine cannot run; nothing has been submitted yet."""

    @abstractmethod
    def describe(self, spec: JobSpec) -> str:
        """What `--dry-run` prints: what the engine would be given, such as a script or a manifest."""

    @abstractmethod
    def submit(self, spec: JobSpec) -> str:
        """Hand the job over and return the engine's own id of it."""

    @abstractmethod
    def jobs(self) -> list[JobState]:
        """All jobs that the engine still knows, the oldest first."""

    @abstractmethod
    def logs(self, job: str, follow: bool) -> Iterator[str]:
        """The output of a job, in pieces; with `follow` until it has ended."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Have it save and end, or never begin."""


class ArrayEngine(Engine):
    """An engine that takes many jobs at once, and holds some back by itself."""

    @abstractmethod
    def submit_all(self, specs: Sequence[JobSpec], at_once: int) -> list[str]:
        """Hand over jobs that differ in their commands only; `at_once` may run at a time."""


def accept(engine: Engine, name: str, spec: JobSpec) -> None:
    """Raise what speaks against submitting `spec` to the engine called `name`."""
    plain = JobSpec(spec.command)
    for field in fields(JobSpec):
        asked = getattr(spec, field.name)
        base = spec.most if field.name == "least" else getattr(plain, field.name)
        if field.name in engine.cannot and asked != base:
            raise ConfigError(
                f"--on {name} has no {OPTIONS[field.name]}: {engine.cannot[field.name]}; leave it out."
            )
    engine.refuse(spec)
