"""What a step works with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.balance.base import Balance
from shoal.data.batch import Batch, Inputs, fits_as_it_is
from shoal.data.loader import Loader, Portion
from shoal.data.stream import StreamLoader
from shoal.errors import ConfigError
from shoal.exchange.contract import Exchange, JoinState, StepView, Tally
from shoal.optimizer import is_known
from shoal.recipe.recipes import Recipes
from shoal.report.meter import Meter
from shoal.report.words import Words
from shoal.seeds import stream
from shoal.train.balancing.balancing import Balancing, key_for
from shoal.train.model.buffers import BufferWatch, Reconciled
from shoal.train.model.first_pass import FirstPass
from shoal.train.model.gathered_penalty import Outline
from shoal.train.model.gradient_hooks import TrainedSet
from shoal.train.model.random_streams import RandomStreams
from shoal.train.model.sync_batchnorm import Presence
from shoal.train.model.whole_model import Whole
from shoal.train.pipelined import Pipelined
from shoal.train.record import Recorder
from shoal.train.technique.clip import Clip
from shoal.train.technique.gather import Gather
from shoal.train.technique.gradients import OnGradients, show_gradients
from shoal.train.technique.learning_rate import rates
from shoal.train.technique.loss import Loss
from shoal.train.technique.metrics import TrainingMetrics
from shoal.train.technique.penalty import Penalty
from shoal.train.technique.precision import LossScale, Precision
from shoal.types import Value
from shoal.world.mesh import Mesh
from shoal.world.world import World


@dataclass
class StepContext:
    """Made by build.py; only `scale`, `count_per_sample`, `on_gradients` and what is kept of the last step (`portion`,
    `tally`, `skips`, `trouble`) change from step to step, and `loss` and `first` after the first."""

    mesh: Mesh
    model: nn.Module
    """The model as this worker runs it: whole, or with its part of each layer, or only its stages of it."""
    pipeline: Pipelined | None
    loss: Loss
    inputs: Inputs
    loader: Loader | StreamLoader
    balance: Balance
    exchange: Exchange
    whole: Whole
    streams: RandomStreams
    presence: Presence
    buffers: Reconciled | None
    """Buffers that have one value on all workers after every step; None where there are none."""
    watch: BufferWatch
    said: Words
    """What this worker has to say to the user."""
    learning: TrainedSet
    split_loss: Callable[[], AbstractContextManager[None]] | None
    """Around forward and backward passes: lets a loss take logits that are cut over the tensor axis."""
    gather: Gather
    """Rows of all workers, for a loss that compares samples."""
    penalty: Penalty | None
    outline: Outline | None
    """Of the whole model, to compute the penalty with, where workers hold parts of it."""
    precision: Precision
    scale: LossScale
    clip: Clip | None
    skip_nan: bool
    meter: Meter
    recorder: Recorder | None
    metrics: TrainingMetrics
    finding: str = ""
    """Why the loss depends on how the batch is cut, as far as the first step has shown."""
    first: FirstPass | None = None
    """Until the first step is over: what forward passes do that would be another thing in parts."""
    count_per_sample: float = 1.0
    """As in the last step. It tells the count of this step before it is known, and in most runs exactly."""
    own_step: Callable[[Any, Batch], Any] | None = None
    """The user's own step, where the run has one: then the exchange is one by model, and `loss` measures nothing."""
    portion: Portion | None = None
    """This worker's samples of the last step: looked at where its loss is not finite."""
    tally: Tally = Tally(0.0, 0.0)  # noqa: RUF009 (frozen)
    """This worker's own loss of the last step."""
    skips: int = 0
    """Steps that were skipped and looked into."""
    trouble: str = ""
    """Why the last step was skipped, to be said after it."""
    on_gradients: OnGradients | None = None
    """A function of the user's that sees gradients between backward and update."""

    def join_state(self) -> JoinState:
        """What a worker that joins now must know to compute what the others do."""
        by_module = self.streams.by_module
        return JoinState(self.count_per_sample, self.scale.value, self.scale.good_steps, by_module)

    def abort(self) -> None:
        """A peer is gone: leave the step where it is, as `Recovery.abort` of the exchange does."""
        self.exchange.abort()
        self.gather.abort()

    def reopen(self, data: World, model_world: World) -> None:
        """After `abort`: go on among these members of the data axis, as many as before. Collective."""
        self.recipes.check_not_torn(data)
        self.exchange.reopen(data, model_world)
        self.gather.reopen(data)

    def show_gradients(self, step: int, mean: float) -> float:
        """Let recipes, and the user if asked for, see gradients. What makes a mean of them then, given what does
        before."""
        self.recipes.on_gradients(step, mean)
        if self.on_gradients is None:
            return mean
        show_gradients(self.exchange, mean, self.on_gradients)
        return 1.0

    def drawing(self, optimizer: Optimizer, step: int) -> AbstractContextManager[object]:
        """Around an update by an optimizer that may draw random numbers: they follow from the seed and the step."""
        return nullcontext() if is_known(optimizer) else stream(self.loader.feed.seed, "optimizer", step)

    def agree(self, value: float, who: str) -> float:
        """One number for all ranks: their own, if it is the same everywhere, else the mean. Collective."""
        if self.exchange.uses_servers and self.world.size > 1:
            raise ConfigError(
                f"{who}: the {self.world.size} workers of this strategy meet at servers only and cannot agree on a "
                "number; use one worker, or another strategy."
            )
        if not isinstance(value, int | float):
            raise ConfigError(f"{who} takes a number, and {value!r} is a {type(value).__name__}.")
        all_ = self.world.gather_numbers([value])[:, 0].tolist()
        return float(value) if len(set(all_)) == 1 else sum(all_) / len(all_)

    def reduce(self, values: dict[str, Value], how: str, watched: str | None) -> dict[str, Value]:
        """Values of the user's own, over all ranks; what is watched is the same on all of them afterwards."""
        if how not in ("none", "mean", "sum"):
            raise ConfigError(f"run.log: reduce='{how}'; it is 'none', 'mean' or 'sum'.")
        if how == "none" and watched not in values:
            return values
        if self.exchange.uses_servers and self.world.size > 1:
            raise ConfigError(
                f"run.log: reduce='{how}' over {self.world.size} workers that meet at servers only; use reduce='none'."
            )
        ranks: list[dict[str, Value]] = self.world.gather_values(values)
        if how == "none":
            return ranks[0]
        for rank, theirs in enumerate(ranks):
            if theirs.keys() != values.keys() or any(isinstance(value, str) for value in theirs.values()):
                raise ConfigError(
                    f"run.log: reduce='{how}' of {sorted(values)} here and {theirs} on rank {rank}; give numbers, and "
                    "the same names on every rank."
                )
        sums = {name: sum(float(theirs[name]) for theirs in ranks) for name in values}
        return {name: total / (len(ranks) if how == "mean" else 1) for name, total in sums.items()}

    def end_first_passes(self) -> None:
        """The first step's passes are over everywhere. Collective."""
        if self.streams.watching:
            self.streams.decide(self.world)
        if self.first is not None:
            self.first.compare()
            self.first = None

    def prefetch_rows(self, step: int, portion: Portion) -> None:
        """This worker's batches of a step are here: rows of embeddings that the next step reads may set out."""
        if self.exchange.tables.may_prefetch(step + 1) and isinstance(self.loader, Loader):
            coming = self.loader.peek(step + 1).batches
            self.exchange.tables.prefetch(step + 1, portion.batches, coming)

    def open_step(self, view: StepView) -> None:
        """Parameters are fresh, and nothing is computed yet."""
        self.join(view.joined)
        self.recipes.before_step(view.step)

    def join(self, state: JoinState | None) -> None:
        """Go on from what running workers know; None: there is nothing to take over."""
        if state is None:
            return
        self.exchange.rescale(
            state.loss_scale / self.scale.value
        )  # gradients that wait have the scale before
        self.count_per_sample = state.count_per_sample
        self.scale.value = state.loss_scale
        self.scale.good_steps = state.good_steps
        if state.by_module is not None and self.streams.watching:
            self.streams.go_on(state.by_module)

    def __post_init__(self) -> None:
        self.world: World = self.mesh.world
        """Everybody."""
        self.rates_given: Any = rates(self.exchange.optimizer)
        """Learning rates and momenta as the script sets them."""
        self.recipes: Recipes = self.whole.recipes
        """What the run trains for beside its loss."""
        self.savers: World = self.mesh.data if self.exchange.uses_servers else self.mesh.world
        """Those who save and load together."""
        self.converts = not fits_as_it_is(self.world.device, self.precision.model)
        """Whether batches have to be moved or cast."""
        key = key_for(self.whole.shape, self.world)
        self.balancing = Balancing(self.balance, self.mesh, self.loader, self.exchange, key)
        """How much of a step each worker gets."""
