"""Steps, one after the other: learning rate, checkpoints, reports. The user's loop pulls them out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from shoal.checkpoint import plain
from shoal.errors import ConfigError
from shoal.report.console import Console
from shoal.report.events import EventLog
from shoal.train.parts import Parts
from shoal.train.schedule import MakeScheduler, advance, make_scheduler, restore_schedule, schedule_state
from shoal.train.step import run_step
from shoal.types import StepReport


@dataclass
class Progress:
    """How far a run has come; what a checkpoint holds beside tensors."""

    step: int = 0
    schedule: Mapping[str, Any] | None = None
    """Where the learning rate stood when the scheduler below took over."""
    scheduler: LRScheduler | None = None

    def schedule_now(self) -> Mapping[str, Any] | None:
        """Where the learning rate stands."""
        return self.schedule if self.scheduler is None else schedule_state(self.scheduler)


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
        progress.schedule = progress.schedule_now()
        scheduler = progress.scheduler = make_scheduler(self.schedule, parts.exchange.optimizer, total)
        if scheduler is not None and progress.schedule is not None:
            restore_schedule(scheduler, progress.schedule)
        first = parts.world.rank == 0
        title = str(self.header["strategy"])
        console = Console(total, title) if first and self.progress_bar else None
        events = EventLog.open(self.log / "events.jsonl", self.header) if first and self.log else None
        try:
            while progress.step < total:
                report = run_step(parts, progress.step)
                progress.step += 1
                if scheduler is not None and not report.skipped:
                    advance(scheduler, report.loss)
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
            raise ConfigError(
                "there is nowhere to save: give Run checkpoint='folder', or save('folder/name')."
            )
        parts = self.parts
        optimizer, model = parts.whole.optimizer_state(), parts.whole.tensors()
        if parts.world.rank == 0:
            state = {
                "step": progress.step,
                "optimizer": type(parts.exchange.optimizer).__name__,
                "scale": parts.scale.value if parts.scale.dynamic else None,
                "good_steps": parts.scale.good_steps,
                "count_per_sample": parts.count_per_sample,
                "schedule": progress.schedule_now(),
                "order": list(parts.exchange.order),
                "data": _data_facts(parts),
            }
            plain.write(root, name, plain.Snapshot(model, optimizer, state))
        parts.world.barrier()

    def resume(self) -> Progress:
        """Load the latest checkpoint, if there is one."""
        if self.checkpoint is None:
            return Progress()
        found = plain.read_latest(self.checkpoint)
        self._agree_on_checkpoint(found[1].state["step"] if found is not None else None)
        if found is None:
            return Progress()
        source, snapshot = found
        parts, state = self.parts, snapshot.state
        parts.whole.load(snapshot.model, source)
        mine = type(parts.exchange.optimizer).__name__
        if state["optimizer"] != mine:
            raise ConfigError(
                f"the checkpoint {source} was written with {state['optimizer']}, and optimizer= now makes "
                f"{mine}; use the same optimizer, or another checkpoint folder."
            )
        if set(state["order"]) == set(parts.exchange.order):
            parts.exchange.lay_out_again(state["order"])
        parts.whole.load_optimizer_state(snapshot.optimizer)
        if parts.scale.dynamic and state["scale"] is not None:
            parts.scale.value, parts.scale.good_steps = state["scale"], state["good_steps"]
        parts.count_per_sample = state["count_per_sample"]
        for name, now in _data_facts(parts).items():
            before = state["data"][name]
            if now != before and parts.world.rank == 0:
                text = (
                    f"{name} was {before} and is {now}: step {state['step']} is another place in the data now"
                )
                print(f"shoal: going on from {source}; {text}.", file=sys.stderr)
        parts.world.barrier()
        return Progress(state["step"], state["schedule"])

    def _agree_on_checkpoint(self, step: int | None) -> None:
        """Ranks that began at different steps would never meet. Also, nobody saves before all have read."""
        steps = self.parts.world.gather_values(step)
        for rank, theirs in enumerate(steps):
            if theirs != steps[0]:
                raise ConfigError(
                    f"rank 0 finds {_at(steps[0])} in {self.checkpoint} and rank {rank} finds {_at(theirs)}; "
                    "the checkpoint folder must be one that all hosts see."
                )

    def _due(self, step: int, total: int) -> bool:
        if self.checkpoint is None or self.checkpoint_every is None:
            return False
        return step % self.checkpoint_every == 0 or step == total


def _data_facts(parts: Parts) -> dict[str, int | bool]:
    """What decides which samples a step has."""
    feed = parts.loader.feed
    return {
        "samples": len(feed.data),
        "global_batch": feed.global_batch,
        "seed": feed.seed,
        "shuffle": feed.shuffle,
    }


def count_steps(text: int | str, steps_per_epoch: int) -> int:
    """A number of steps, or of epochs.

    >>> count_steps("2ep", steps_per_epoch=50), count_steps(7, steps_per_epoch=50)
    (100, 7)
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"(?:(\d+)|(\d+(?:\.\d+)?)ep)", str(text))
    if match is None:
        raise ConfigError(f"steps({text!r}): give a number of steps, as 100, or of epochs, as '2ep'.")
    return int(match[1]) if match[1] else round(float(match[2]) * steps_per_epoch)


def _at(step: int | None) -> str:
    return "no checkpoint" if step is None else f"step {step}"
