"""The face of Shoal: `shoal.Run`."""

from __future__ import annotations

import atexit
import dataclasses
import os
import platform
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.config import parse_strategy
from shoal.data.source import Source, doubts
from shoal.errors import ConfigError
from shoal.optimizer import MakeOptimizer
from shoal.plan.automatic import NAME
from shoal.report.state import StateFile
from shoal.train.answer_dry_run import answer
from shoal.train.build import build
from shoal.train.calls.calls import Calls
from shoal.train.calls.same_settings import agree_on_settings
from shoal.train.evaluate import describe, evaluate
from shoal.train.export.exporting import Exporting
from shoal.train.export.request import pristine
from shoal.train.loop import Loop
from shoal.train.model.shortage import noting, remedies_of_evaluation, remedies_of_making
from shoal.train.own_step.build import build_own_step
from shoal.train.planning.answer_plan import answer_plan
from shoal.train.planning.profile_work import key_of
from shoal.train.planning.settle_plan import settle_plan
from shoal.train.planning.watch import Foresight
from shoal.train.run_config import RunConfig, adopt_loader, apply_overrides, log_folder, plain_settings
from shoal.train.server_setup import meets_at_servers
from shoal.train.state.checkpoint_config import CheckpointConfig
from shoal.train.state.checkpoints import BEST, Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.technique.early_stop import Best, EarlyStop, check_mode, is_better
from shoal.train.technique.gradients import OnGradients, check_gradients
from shoal.train.technique.journal import Header, check_values
from shoal.train.technique.metrics import Metric
from shoal.train.validation import evaluator
from shoal.train.validation.between import measured_steps, validates_itself
from shoal.train.watch.watch import Watch
from shoal.types import Evaluation, StepReport, Value
from shoal.world.devices import choose_device
from shoal.world.failure import at_exit, end_in_one_sentence
from shoal.world.launch import Launch, from_environment
from shoal.world.progress_page import Phase, ProgressPage
from shoal.world.world import World


@dataclass(kw_only=True)
class Run(RunConfig):
    """A training run: an ordinary model and loss, and one line that says how the work is shared.

    The script is the same alone (`python train.py`) and in parallel (`shoal run --workers 4 train.py`, or
    torchrun); `--strategy`, `--steps` and `--set name=value` override these fields from outside.

    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    >>> def loss(output, batch):
    ...     return ((output - batch[1]) ** 2).sum(), batch[1].numel()
    >>> run = Run(model=lambda: nn.Linear(4, 1), loss=loss, data=data, global_batch=8, log=None, progress=False,
    ...           optimizer=lambda params: torch.optim.SGD(params, lr=0.1), strategy="solo")
    >>> [step.number for step in run.steps("1ep")]
    [1, 2, 3, 4]
    """

    def __post_init__(self) -> None:
        launch = from_environment()
        end_in_one_sentence(launch.rank)
        self._steps_override = apply_overrides(self, launch.overrides)
        said = adopt_loader(self)
        watched = evaluator.become_evaluator(self, launch)
        self.accumulate *= launch.stands_for
        untrained = pristine(self.model) if launch.export else None
        self._rehearsal = bool(launch.record)
        if launch.record:
            self._keep_nothing(launch.record)
        config = self.config = self._settings()
        evaluator.check_stages(config, launch)
        early_stop = EarlyStop.of(self.early_stop)
        kept = self._kept()
        if launch.dry_run:
            if launch.dry_run.startswith("plan "):
                answer_plan(config, launch)
            else:
                device = choose_device(self.device, launch.local_rank)
                print(answer(config, launch.dry_run, launch.size, device))
            sys.stdout.flush()
            os._exit(0)  # threads of the script's own would keep the process, and nothing is left to do
        page = ProgressPage(launch.progress)
        page.enter(Phase.BUILDING)
        self.world = _join(config, launch)
        atexit.register(self.world.close)
        self._state = self._open_state(page)
        if config.strategy.startswith(NAME) or config.memory:
            settle_plan(config, self.world)
            self.strategy = config.strategy
            self.accumulate = config.accumulate
            self.recompute = config.recompute
        exchange = parse_strategy(config.strategy).exchange.name
        with noting(
            self.world.rank, "while the run was made", lambda: remedies_of_making(exchange, launch.size)
        ):
            self._make(launch, said, kept, early_stop, page)
        if watched is not None:
            evaluator.evaluate_checkpoints(self._context, config, watched, launch)
        self._exporting = Exporting.of(
            launch.export, self._context, untrained, self.state_dict, self._progress.step
        )

    def _make(
        self,
        launch: Launch,
        said: Sequence[str],
        kept: CheckpointConfig,
        early_stop: EarlyStop | None,
        page: ProgressPage,
    ) -> None:
        """All that takes memory."""
        config = self.config
        agree_on_settings(vars(config), self.world)
        if self.world.rank == 0 and not launch.record:
            for sentence in (*said, *doubts(config.data)):
                print(f"shoal: {sentence}", file=sys.stderr)
        make = build if config.step is None else build_own_step
        self.plan, self._context = make(config, self.world, launch.record)
        self._context.meter.page = page
        page.plans(str(self.plan))
        if launch.still:
            self._context.model.eval()
        self._calls = Calls.of(self.world, self._context.exchange, page)
        if self._context.mesh.model.size > 1 and self.progress and self.world.rank == 0:
            print(f"{self.plan}\n{self._context.mesh.drawing()}", file=sys.stderr)
        self._checkpoints = Checkpoints(self._context, str(self.plan), kept, launch)
        self._foresight = self._foreseen()
        self._loop = self._make_loop(launch)
        exchange = self._context.exchange
        # Servers must be told of the end, so what talks to them stays; all else may be collected before.
        atexit.register(exchange.close) if exchange.uses_servers else at_exit(exchange.close)
        self._progress = self._checkpoints.resume() if exchange.begins else Progress()
        if early_stop is not None:
            early_stop.restore(self._progress.early_stop_was)
            self._progress.early_stop = early_stop
        self._validates = validates_itself(config, self._context, launch)
        self._calls.step(self._progress.step)
        exchange.start(self._progress.step, self._context.join_state())
        page.enter(Phase.BETWEEN)
        at_exit(self._checkpoints.leave)  # a script may end in the middle of its loop
        atexit.register(self._calls.close)

    def _open_state(self, page: ProgressPage) -> StateFile | None:
        """The file in which this rank says what it is doing."""
        folder = log_folder(self.config)
        if folder is None:
            return None
        world = self.world
        state = StateFile(folder, world.rank, world.size, page, str(world.device))
        weakref.finalize(self, state.close)  # at exit too
        return state

    def _keep_nothing(self, record: str) -> None:
        """A rehearsal starts from the beginning, and leaves nothing of its own behind but the record."""
        self.checkpoint = f"{record}/checkpoint"
        self.checkpoint_every = None
        self.copies = ""
        self.__dict__ |= {"log": None, "progress": False, "trackers": "", "profile": ""}

    def _make_loop(self, launch: Launch) -> Loop:
        return Loop(
            self._context,
            self.schedule,
            self._checkpoints,
            log_folder(self.config),
            self._header(),
            self.progress,
            self.schedule_every,
            launch.finishing,
            self._calls,
            Watch(self._context, self.check_replicas),
            self._state,
            launch.again,
            self._foresight,
            self.trackers,
            self.profile,
        )

    @property
    def module(self) -> nn.Module:
        """The model as it is being trained: call it, on every rank, before the first step or between two."""
        self._context.exchange.complete()
        return self._context.model

    @property  # type: ignore[misc]  # after the setting of this name has been used up
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer as it really runs: read and set what is in its groups, between two steps, on every rank alike.

        Its parameters are what this worker updates: whole tensors, or pieces of a slice. A schedule sets rates too.
        """
        return self._context.exchange.optimizer

    @optimizer.setter
    def optimizer(self, make: MakeOptimizer) -> None:
        """What the generated constructor does with `optimizer=`."""
        self.__dict__["optimizer"] = make

    def steps(self, how_long: int | str) -> Iterator[StepReport]:
        """Train, yielding after each step; up to so many steps ("2ep": epochs) counted from the run's beginning."""
        if self._exporting is not None:
            return iter(())
        asked = how_long if self._steps_override is None else self._steps_override
        steps = self._loop.steps(asked, self._progress)
        return measured_steps(self._loop, steps, self._validate) if self._validates else steps

    def _validate(self) -> None:
        assert self.validation is not None
        self.log(evaluator.values_of(self.evaluate(self.validation, self.metrics)))

    @contextmanager
    def gradients(self, function: OnGradients) -> Iterator[None]:
        """While it lasts, `function` sees the gradients of each step between backward and update, and may change them.

        >>> def halve(gradients):
        ...     for gradient in gradients.values():
        ...         gradient.mul_(0.5)
        >>> with run.gradients(halve):                                       # doctest: +SKIP
        ...     for step in run.steps(100):
        ...         print(step.loss)
        """
        context = self._context
        check_gradients(context.exchange, function, context.on_gradients is not None)
        context.on_gradients = function
        try:
            yield
        finally:
            context.on_gradients = None

    def schedule_step(self, metric: float | None = None) -> None:
        """Move the learning rate, where `schedule_every="call"` or a ReduceLROnPlateau of your own waits for it.

        Every rank calls it. If their metrics differ, all take the mean.
        """
        scheduler, answers = self._progress.scheduler, self._progress.answers
        if answers.known("run.schedule_step") is not None:
            return
        if scheduler is None:
            why = "call it after a step" if self.schedule is not None else "give Run schedule="
            raise ConfigError(f"run.schedule_step: there is no schedule to move; {why}.")
        with self._calls.together("run.schedule_step"):
            agreed = None if metric is None else self._context.agree(metric, "run.schedule_step")
        scheduler.step(agreed)
        answers.note("run.schedule_step", True)
        self._loop.decided(self._progress)

    def log(  # type: ignore[override, misc]  # likewise
        self, values: Mapping[str, Value | torch.Tensor], reduce: str = "none"
    ) -> dict[str, Value]:
        """Write numbers or text of your own into events.jsonl; returns what was written.

        `reduce`: "none" writes rank 0's values; "mean" and "sum" are over all ranks, all of which call it. So do all
        for the value that early_stop= watches.
        """
        early, answers = self._progress.early_stop, self._progress.answers
        watched = early.rule.watch if early is not None else None
        meets = reduce != "none" or watched in values
        known: dict[str, Value] | None = answers.known("run.log") if meets else None
        if known is not None:
            return known
        with self._calls.together("run.log") if meets else nullcontext():
            found = self._context.reduce(check_values(values), reduce, watched)
        if meets:
            answers.note("run.log", found)
        elif answers.replays:
            return found  # it is in the log
        self._loop.journal.log(self._progress.step, found)
        if early is not None and watched in found:
            early.observe(watched, float(found[watched]), self._progress.step)
            self._loop.decided(self._progress)
        return found

    def best(self, name: str, value: float, mode: str = "min") -> bool:
        """Keep the checkpoint `best` if this value is the best so far; whether it is.

        Every rank calls it. If their values differ, all take the mean. It is never pruned, and a run that goes on
        knows its value.
        """
        check_mode("run.best", mode)
        answers = self._progress.answers
        known: bool | None = answers.known(f"run.best({name!r})")
        if known is not None:
            return known
        with self._calls.together(f"run.best({name!r})"):
            value = self._context.agree(value, "run.best")
        progress = self._progress
        if progress.early_stop is not None:
            progress.early_stop.observe(name, value, progress.step)
            self._loop.decided(progress)
        before = progress.best or self._checkpoints.best_so_far()
        if before is not None and (before.name, before.mode) != (name, mode):
            raise ConfigError(
                f"run.best('{name}', mode='{mode}'): the checkpoint best is the best by '{before.name}' "
                f"(mode='{before.mode}'), and a folder has one; keep to it, or use another folder."
            )
        better = is_better(value, None if before is None else before.value, mode)
        progress.best = Best(name, value, mode, progress.step) if better else before
        answers.note(f"run.best({name!r})", better)
        if better:
            self._checkpoints.begin(BEST, replace(progress))
        return better

    def evaluate(
        self,
        data: Source | DataLoader[Any],
        metrics: Mapping[str, Metric] | None = None,
        batch: int | None = None,
        weights: str | None = None,
    ) -> Evaluation:
        """Loss, and metrics given as (output, batch) -> (sum, count), over a whole data set and all workers.

        `weights`: "ema" or "swa" measures the average that the run keeps.
        """
        measures, context, answers = metrics or {}, self._context, self._progress.answers
        if self._exporting is not None:
            return self._exporting.measure(lambda: evaluate(context, data, measures, batch))
        what = describe(data, measures, weights)
        if (known := answers.known(what)) is not None:
            return Evaluation(*known)
        given = data.batch_size if isinstance(data, DataLoader) else context.loader.feed.global_batch
        phase = f"in run.evaluate after step {self._progress.step}"
        with (
            self._calls.together(what),
            noting(
                self.world.rank,
                phase,
                lambda: remedies_of_evaluation(batch or given or 1, context.mesh.data.size),
            ),
            context.recipes.in_place(weights),
        ):
            found = evaluate(context, data, measures, batch)
        answers.note(what, [found.loss, found.count, found.metrics])
        return found

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all workers, in the order of the global batch: for a loss that compares samples with each other.

        Every worker's loss calls it equally often. The gradient is that of one process, if each loss is that of the
        whole batch, or counts each worker's own rows only. Alone it gives the tensor back.
        """
        gather, calls = self._context.gather, self._calls
        alone = self._context.learning.computing or calls.inside or gather.refusal
        with nullcontext() if alone else calls.together("run.gather"):
            return gather(tensor)

    def save(self, name: str) -> None:
        """Write a full checkpoint: under the checkpoint folder, or at a path if the name has a slash."""
        if self._exporting is not None:
            return  # nothing is trained, so there is nothing to write
        if self._context.exchange.uses_servers and self.world.rank > 0:
            return  # what the servers hold is one state, and one worker writes it
        path = Path(name)
        elsewhere = len(path.parts) > 1 and not self._rehearsal
        if self._progress.answers.known(f"run.save({name!r})") is not None:
            return  # it was written then
        with self._calls.together(f"run.save({name!r})"):
            self._checkpoints.save(path.name, self._progress, path.parent if elsewhere else None)
        self._progress.answers.note(f"run.save({name!r})", True)

    def state_dict(self, weights: str | None = None) -> dict[str, torch.Tensor]:
        """The whole model on rank 0, on the CPU; empty on other ranks. Every rank calls it.

        `weights`: "ema" or "swa" gives the average that the run keeps, "export" what recipes make of it in the end.
        """
        with self._calls.together("run.state_dict"), self._context.recipes.in_place(weights):
            whole = self._context.whole.state_dict()
        return self._context.recipes.export(weights, whole) if self.world.rank == 0 else {}

    def _kept(self) -> CheckpointConfig:
        """What is asked for of checkpoints."""
        return CheckpointConfig.of(
            self.checkpoint,
            self.checkpoint_every,
            self.checkpoint_keep,
            self.copies,
            self.checkpoint_failures,
        )

    def _header(self) -> Header:
        """What the event log begins with."""
        return {
            "rank": self.world.rank,
            "workers": self.world.size,
            "strategy": str(self.plan),
            "precision": self.precision,
            "device": str(self.world.device),
            "version": shoal.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "settings": plain_settings(self.config),
            **self._skew(),
            **(self._foresight.header() if self._foresight is not None else {}),
        }

    def _foreseen(self) -> Foresight | None:
        """What was predicted of this run; rank 0 compares."""
        if self.world.rank or self._rehearsal:
            return None
        shape = self._context.whole.shape
        key = key_of(self.config, {name: shape.sizes[name] for name in shape.parameters})
        return Foresight.of(self.plan, key, self.world.size, self.config.accumulate)

    def _skew(self) -> dict[str, object]:
        """How uneven the parts of a step are, where keys or shares decide; rank 0 says it once."""
        loader = self._context.loader
        found = None if loader.feed.partition.even or self.world.rank > 0 else loader.skew()
        if found is None:
            return {}
        skew, steps = found
        if self.progress:
            text = f"the largest part has {skew:.2f} × its share (over {steps} steps)"
            print(f"partition {self.partition}: {text}", file=sys.stderr)
            if self.batchnorm == "own" and self._context.presence.own and not loader.feed.partition.counted:
                text = "batch normalisation is measured by the first worker, which may see few samples"
                print(f"partition {self.partition}: {text}; consider batchnorm='sync'.", file=sys.stderr)
        return {"partition": self.partition, "skew": round(skew, 4)}

    def _settings(self) -> RunConfig:
        """What the user asks for; `log` and `optimizer` are then free for what the run itself has of these names."""
        found = {field.name: self.__dict__[field.name] for field in dataclasses.fields(RunConfig)}
        for name in ("log", "optimizer"):
            del self.__dict__[name]
        return RunConfig(**found)


def _join(config: RunConfig, launch: Launch) -> World:
    # Workers that meet at servers only join no group: whoever is lost from one cannot come back to it.
    if launch.launcher and meets_at_servers(config.strategy):
        return World.unjoined(launch, config.device)
    return World.open(launch, config.backend, config.device)
