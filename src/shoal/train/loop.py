"""Steps, one after the other: learning rate, checkpoints, reports. The user's loop pulls them out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.checkpoint import plain
from shoal.errors import ConfigError
from shoal.report.console import Console
from shoal.report.events import EventLog
from shoal.train.schedule import MakeScheduler, make_scheduler
from shoal.train.step import Parts, run_step
from shoal.types import StepReport


@dataclass
class Progress:
    """How far a run has come; what a checkpoint holds beside tensors."""

    step: int = 0
    schedule: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Loop:
    """What the loop does around steps."""

    parts: Parts
    schedule: str | MakeScheduler | None
    checkpoint: Path | None
    checkpoint_every: int | None
    log: Path | None
    header: Mapping[str, str | int | float]
    progress_bar: bool

    def steps(self, total: int, progress: Progress) -> Iterator[StepReport]:
        """Train up to step `total`, yielding a report after each step; goes on from `progress`."""
        parts = self.parts
        scheduler = make_scheduler(self.schedule, parts.exchange.optimizer, total)
        if scheduler is not None and progress.schedule is not None:
            scheduler.load_state_dict(dict(progress.schedule))
        first = parts.world.rank == 0
        title = str(self.header["strategy"])
        console = Console(total, title) if first and self.progress_bar else None
        events = EventLog.open(self.log / "events.jsonl", self.header) if first and self.log else None
        try:
            while progress.step < total:
                report = run_step(parts, progress.step)
                progress.step += 1
                if scheduler is not None and not report.skipped:
                    _advance(scheduler, report.loss)
                    progress.schedule = _plain_state(scheduler)
                if console is not None:
                    console.update(report)
                if events is not None:
                    events.write(report)
                if self._due(progress.step, total):
                    self.save(f"step-{progress.step}", progress)
                yield report
        finally:
            if console is not None:
                console.close()
            if events is not None:
                events.close()

    def save(self, name: str, progress: Progress, root: Path | None = None) -> None:
        """Write a full checkpoint. Every rank calls it."""
        root = root or self.checkpoint
        if root is None:
            raise ConfigError("there is nowhere to save: give Run checkpoint='folder', or save('folder/name').")
        parts = self.parts
        optimizer = parts.exchange.optimizer_state()
        if parts.world.rank == 0:
            state = {
                "step": progress.step,
                "scale": parts.scale.value,
                "good_steps": parts.scale.good_steps,
                "usual_count": parts.usual_count,
                "schedule": progress.schedule,
            }
            plain.write(root, name, plain.Snapshot(plain.model_tensors(parts.model), optimizer, state))
        parts.world.barrier()

    def resume(self) -> Progress:
        """Load the latest checkpoint, if there is one."""
        found = plain.read_latest(self.checkpoint) if self.checkpoint is not None else None
        if found is None:
            return Progress()
        source, snapshot = found
        parts = self.parts
        with torch.no_grad():
            plain.load_model(parts.model, snapshot.model, source)
        parts.exchange.load_optimizer_state(snapshot.optimizer)
        state = snapshot.state
        parts.scale.value, parts.scale.good_steps = state["scale"], state["good_steps"]
        parts.usual_count = state["usual_count"]
        parts.world.barrier()
        return Progress(state["step"], state["schedule"])

    def _due(self, step: int, total: int) -> bool:
        if self.checkpoint is None or self.checkpoint_every is None:
            return False
        return step % self.checkpoint_every == 0 or step == total


def count_steps(text: int | str, steps_per_epoch: int) -> int:
    """A number of steps, or of epochs.

    >>> count_steps("2ep", steps_per_epoch=50), count_steps(7, steps_per_epoch=50)
    (100, 7)
    """
    if isinstance(text, int) and text >= 0:
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ep)?", str(text))
    if match is None:
        raise ConfigError(f"steps({text!r}): give a number of steps, as 100, or of epochs, as '2ep'.")
    return round(float(match[1]) * steps_per_epoch) if match[2] else int(float(match[1]))


def _advance(scheduler: LRScheduler, loss: float) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def _plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    """The numbers of a scheduler's state; functions in it are made anew by the script."""
    kept = {}
    for key, value in scheduler.state_dict().items():
        if isinstance(value, int | float | str | None) or (
            isinstance(value, list) and all(isinstance(v, int | float) for v in value)
        ):
            kept[key] = value
    return kept
