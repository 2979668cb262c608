"""Steps, one after the other: learning rate, checkpoints, reports. The user's loop pulls them out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from shoal.config import parse_strategy
from shoal.data.loader import Loader
from shoal.data.stream import StreamLoader
from shoal.errors import ConfigError
from shoal.exchange.contract import StepView
from shoal.report.profile import StepProfile, profile_steps
from shoal.report.state import StateFile
from shoal.train.calls.call import END_OF_LOOP, LOOP
from shoal.train.calls.calls import Calls
from shoal.train.model.shortage import Shortage, note_place
from shoal.train.own_step.run_own_step import run_own_step
from shoal.train.planning.watch import Foresight
from shoal.train.state.checkpoints import Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.state.start_again import note_suspects, tell_return
from shoal.train.step import run_step
from shoal.train.step_context import StepContext
from shoal.train.technique.journal import Header, Journal
from shoal.train.technique.learning_rate import MakeScheduler, rates
from shoal.train.technique.schedule import Schedule
from shoal.train.technique.stop_request import YIELD, StopRequest
from shoal.train.watch.memory import MemoryNote
from shoal.train.watch.watch import Watch
from shoal.types import StepReport
from shoal.world.failure import YIELD_CODE
from shoal.world.launch import Again
from shoal.world.progress_page import Phase, ProgressPage
from shoal.world.world import World

Decided = tuple[object, object, object]


@dataclass
class Boundary:
    """Between two steps: which one is over, and what has been saved of it."""

    step: int = 0
    """0: the loop's body does not run."""
    due: bool = False
    saved: Decided | None = None


@dataclass(frozen=True)
class Loop:
    """What the loop does around steps."""

    context: StepContext
    schedule: str | MakeScheduler | None
    checkpoints: Checkpoints
    log: Path | None
    header: Header
    progress_bar: bool
    schedule_every: str = "step"
    finishing: str = ""
    """The file by which our launcher learns that a signal is obeyed later."""
    calls: Calls = field(default_factory=Calls)
    watch: Watch | None = None
    """What looks after the run between two steps; None: nobody."""
    state: StateFile | None = None
    """Where this rank says what it is doing; None: nowhere."""
    again: Again = field(default_factory=Again)
    """Why the workers were started anew, if they were."""
    foresight: Foresight | None = None
    """What was predicted of this run; None: nothing."""
    trackers: str = ""
    profile: str = ""

    @cached_property
    def journal(self) -> Journal:
        """The progress bar and the event log."""
        return Journal(
            self.log, self.header, self.progress_bar, self.context.meter, self.state, self.trackers
        )

    @property
    def page(self) -> ProgressPage:
        """Where a launcher reads how far this worker is."""
        return self.context.meter.page

    @cached_property
    def _boundary(self) -> Boundary:
        return Boundary()

    def decided(self, progress: Progress) -> None:
        """The user has decided something that checkpoints hold, in a call that every rank makes.

        Saved at once where a checkpoint is due: the body may end with `break`, and nothing comes after that.
        """
        if self._boundary.step:
            self._save_decided(progress)

    @property
    def at_checkpoint(self) -> bool:
        """Whether the step that is over is saved."""
        return self._boundary.due

    def steps(self, how_long: int | str, progress: Progress) -> Iterator[StepReport]:
        """Train until `how_long` is reached, yielding a report after each step; goes on from `progress`."""
        exchange = self.context.exchange
        world = self.context.world
        # Where workers meet at servers, each may come and go alone, and what counts is there: the first of them
        # finishes the step, with the parts of those that have ended, and saves it.
        saves = self.checkpoints.saves and (world.rank == 0 or not exchange.uses_servers)
        page = self.page if self.checkpoints.keeps else None
        together = World.alone(world.device) if exchange.uses_servers else world
        stop = StopRequest(together, exchange.meeting_interval, saves, self.finishing, page)
        try:
            with stop:
                yield from self._steps(Goal.of(how_long, self.context.loader), progress, stop)
                self.page.enter(Phase.SAVING)
                self.checkpoints.finish(progress)
                self.page.enter(Phase.ENDED)
            if stop.number:
                stop.leave()
        except GeneratorExit:  # the user has had enough
            self.checkpoints.leave()
            raise
        except BaseException as error:
            self.checkpoints.abandon()
            self.calls.explain(error)
            if isinstance(error, Exception):
                plan = parse_strategy(str(self.header["strategy"]))
                shortage = Shortage.of(self.context.model, self.context.loader.feed, plan)
                step = f"in step {self.calls.begun}"
                note_place(error, self.context.world.rank, step, shortage.remedies)
            raise
        finally:
            if self._profiler is not None:
                self._profiler.close()

    def _steps(self, goal: Goal, progress: Progress, stop: StopRequest) -> Iterator[StepReport]:
        context, journal = self.context, self.journal
        work = context.exchange.work
        total = goal.steps
        calls = self.calls
        calls.compare(f"{LOOP}({f'{goal.epochs:g}ep' if total is None else total})")
        self.checkpoints.hold(progress.step)
        schedule = self._take_up_schedule(goal, progress)
        early = progress.early_stop
        if goal.reached(progress.step) or (early is not None and early.stopped):
            self._say_nothing_is_left(goal, progress)
            if total is None:
                work.final_sync()
            return
        calls.ended = False
        self.page.begin_loop()
        journal.open(total)
        try:
            done = False
            while not done and (view := work.next(progress.step, total)) is not None:
                calls.step(view.step + 1)
                if schedule is not None:
                    schedule.catch_up(view.step - progress.step)  # steps that others have done meanwhile
                epoch = context.loader.cursor(view.step).epoch if self.schedule_every == "epoch" else 0
                report = self._take(view)
                # Where each part is a step of its own, others may still be at this one: it is not over yet.
                ahead = view.step >= progress.step
                progress.step = max(progress.step, report.number)
                calls.step(progress.step)
                last = goal.reached(report.number)
                done = total is None and last  # with a total, the work source says when there is no more
                if schedule is not None and ahead:
                    ended = (
                        context.loader.cursor(report.number).epoch - epoch if schedule.every == "epoch" else 0
                    )
                    schedule.after_step(report.loss, ended, report.skipped and not work.loss_is_local)
                    if not report.skipped or work.loss_is_local:
                        schedule.catch_up(report.number - view.step - 1)
                self._tell(report)
                self._enter_body(progress, report.number, last)
                yield report
                if self._after_body(progress, stop):
                    break
            calls.ended = True
            calls.compare(END_OF_LOOP)
            if total is None or (early is not None and early.stopped):
                work.final_sync()
            context.watch.check("at the end")
            journal.servers(context.exchange.servers, last=True)
            self._say_what_was_missed(progress)
        finally:
            self._leave_body(progress)
            context.balancing.close()
            journal.close(progress.step)

    def _tell(self, report: StepReport) -> None:
        """A step is over: into the journal with it, and with what has been found by watching. Collective."""
        context, journal = self.context, self.journal
        change = context.balancing.after(report)
        journal.step(report)
        if self.watch is not None:
            self.watch.after(report, journal)
        if self.foresight is not None and (off := self.foresight.after(report)):
            journal.say(off)
        self._memory.after(report, journal)
        if change is not None:
            journal.change(str(change), change.facts())
        journal.servers(context.exchange.servers)

    @cached_property
    def _memory(self) -> MemoryNote:
        return MemoryNote(self.context, self.foresight.kinds if self.foresight is not None else {})

    @cached_property
    def _profiler(self) -> StepProfile | None:
        """What profile= asks for, on this rank."""
        steps = profile_steps(self.profile)
        if steps is None or self.log is None:
            return None
        return StepProfile(*steps, self.log / f"profile-rank{self.context.world.rank:05}.json")

    def _take(self, view: StepView) -> StepReport:
        """One step; after a restart also the words that belong to it."""
        context, again = self.context, self.again
        if again.times:
            note_suspects(again, context, view.step)
        profiler = self._profiler
        if profiler is not None:
            profiler.before(view.step + 1)
        report = run_step(context, view) if context.own_step is None else run_own_step(context, view)
        if profiler is not None and (said := profiler.after(view.step + 1)):
            self.journal.say(said)
        if again.times and self.page.is_back():
            tell_return(again, view.step, self.journal, report.seconds)
        return report

    def _enter_body(self, progress: Progress, step: int, last: bool) -> None:
        """The step is over, and its checkpoint begun if one is due: the user's loop comes next."""
        due = self.checkpoints.due(step, last)
        if due:  # a run that goes on from it does not write of the steps before it again
            self.journal.flush()
        self._boundary.due = self.context.exchange.work.saves and due
        self._boundary.saved = self._save(progress, step) if self._boundary.due else None
        self._boundary.step = step
        progress.answers.enter_body()

    def _after_body(self, progress: Progress, stop: StopRequest) -> bool:
        """The user's loop has come back: save what it has decided, obey a signal; whether it stops early."""
        self.page.enter(Phase.EXCHANGING)  # until the next step is given to this worker
        step = self._boundary.step
        self._save_decided(progress)
        self._leave_body(progress)
        if stop.reached(step):
            self._make_way(progress, step) if stop.number == YIELD else self._leave(progress, stop)
        early = progress.early_stop
        if (early is None or not early.stopped) and self.context.exchange.work.saves:
            self._snapshot(progress, step)
        if early is not None and early.stopped:
            self.journal.say(f"early stop after step {step}: {early.reason}")
        return early is not None and early.stopped

    def _leave_body(self, progress: Progress) -> None:
        self._boundary.step = 0
        progress.answers.inside = False

    def _snapshot(self, progress: Progress, step: int) -> None:
        """In memory, after the loop's body: whoever goes on from there does not do it again."""
        if self.checkpoints.snapshot(step, progress):
            self.journal.flush()  # the log holds every step before it

    def _save_decided(self, progress: Progress) -> None:
        """Begin the checkpoint of this step once more if it is due and holds something else than has been decided."""
        boundary, early = self._boundary, progress.early_stop
        stopped = early is not None and early.stopped
        due = boundary.due or (stopped and self.checkpoints.due(boundary.step, last=True))
        if due and boundary.saved != self._decided(progress):
            boundary.saved = self._save(progress, boundary.step)

    def _take_up_schedule(self, goal: Goal, progress: Progress) -> Schedule | None:
        progress.schedule = progress.schedule_now()
        if self.schedule is None:
            return None
        optimizer = self.context.exchange.optimizer
        schedule = Schedule.of(self.schedule, self.schedule_every, optimizer, goal.steps, goal.whole_epochs)
        progress.scheduler = schedule
        if progress.schedule is not None:
            schedule.restore(progress.schedule)
        return schedule

    def _save(self, progress: Progress, step: int) -> Decided:
        """Begin a checkpoint. Before the loop's body, which may never come to its end; and again if it has decided."""
        before = self.page.phase
        self.page.enter(Phase.SAVING)
        with self.journal.saving(step):
            self.checkpoints.begin(f"step-{step}", replace(progress, step=step))
        self.page.enter(before)
        return self._decided(progress)

    def _decided(self, progress: Progress) -> Decided:
        """What the body of the user's loop may change of what a checkpoint holds."""
        early = progress.early_stop
        kept = early.state() if early is not None else None
        return progress.schedule_now(), kept, rates(self.context.exchange.optimizer)

    def _leave(self, progress: Progress, stop: StopRequest) -> None:
        """A signal has asked for it: save, say what was saved, and end."""
        name = f"step-{progress.step}"
        self.page.enter(Phase.SAVING)
        if not self.checkpoints.due(progress.step, last=False):  # else it is being written
            self.checkpoints.save(name, progress, automatic=True)
        self.checkpoints.wait()
        where = self.checkpoints.place(name)
        self.journal.say(
            f"stopped after step {progress.step}; saved {where}; the same command goes on from there"
        )
        self.page.enter(Phase.ENDED)
        stop.leave()

    def _make_way(self, progress: Progress, step: int) -> None:
        """Others go on from here, as many as the launcher wants."""
        self.page.enter(Phase.SAVING)
        self.checkpoints.snapshot_now(step, progress)
        self.journal.flush()
        self.page.enter(Phase.ENDED)
        raise SystemExit(YIELD_CODE)

    def _say_nothing_is_left(self, goal: Goal, progress: Progress) -> None:
        early = progress.early_stop
        if self.again.times and not self.page.back:
            return  # the script comes by again on its way to where it was
        if goal.reached(progress.step):
            if progress.step:
                asked = f"{goal.steps} were" if goal.steps is not None else f"{goal.epochs:g} epochs were"
                self.journal.say(f"nothing left to do: {progress.step} steps are done, and {asked} asked for")
        elif early is not None:
            self.journal.say(
                f"nothing left to do: the run has stopped early after step {progress.step}: {early.reason}"
            )

    def _say_what_was_missed(self, progress: Progress) -> None:
        """The user has asked for something that could not happen."""
        early = progress.early_stop
        if progress.scheduler is not None and progress.scheduler.waits:
            self.journal.say(progress.scheduler.waits)
        if early is not None and not early.seen:
            name = early.rule.watch
            self.journal.say(
                f"early_stop: no value of '{name}' has come; give it, as run.log({{'{name}': value}})"
            )


@dataclass(frozen=True)
class Goal:
    """How long to train, counted from the run's beginning."""

    loader: Loader | StreamLoader
    steps: int | None
    """None where only the end of a stream tells."""
    epochs: float = 0.0

    @staticmethod
    def of(text: int | str, loader: Loader | StreamLoader) -> Goal:
        """A number of steps, or of epochs.

        >>> from shoal.data.feed import Feed
        >>> loader = Loader(Feed(data=list(range(100)), global_batch=2, rank=0, size=1))
        >>> Goal.of("2ep", loader).steps, Goal.of(7, loader).steps
        (100, 7)
        """
        if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
            return Goal(loader, text)
        match = re.fullmatch(r"(?:(\d+)|(\d+(?:\.\d+)?)ep)", str(text))
        if match is None:
            raise ConfigError(f"steps({text!r}): give a number of steps, as 100, or of epochs, as '2ep'.")
        if match[1]:
            return Goal(loader, int(match[1]))
        return Goal(loader, loader.steps_until(float(match[2])), float(match[2]))

    @property
    def whole_epochs(self) -> int | None:
        """In how many epochs, begun ones too, these steps are; None where nobody knows."""
        if self.epochs:
            return math.ceil(self.epochs)
        per_epoch = self.loader.steps_per_epoch
        return None if per_epoch is None or self.steps is None else math.ceil(self.steps / per_epoch)

    def reached(self, step: int) -> bool:
        """Whether so many steps are enough."""
        return step >= self.steps if self.steps is not None else self.loader.ended(step, self.epochs)
