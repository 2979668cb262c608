"""A step through a pipeline: torch's runtime carries out our schedule on this worker's stages.

Every worker of a pipeline has the whole portion of its replica at hand, so inputs need not travel; only activations
and their gradients do. The last stage computes the loss, as a sum like everywhere. torch's buffers have one size, so
the activation of a micro-batch that is short is lengthened on its way and cut again where it arrives: the model
never sees more than the samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.call import arguments
from shoal.data.batch import Batch, Inputs, convert, length
from shoal.data.loader import Feed, Portion
from shoal.errors import ConfigError
from shoal.exchange.contract import PipelineGrads, Tally
from shoal.exchange.local_tensor import local
from shoal.pipeline.base import Schedule
from shoal.pipeline.lower import to_torch
from shoal.pipeline.stage import StageModule
from shoal.pipeline.timed_stage import PassClock, TimedStage
from shoal.report.spans import Spans
from shoal.torch_private import (
    ComputationType,
    PipelineRuntime,
    prepare_schedule,
    step_microbatches,
    tree_leaves,
)
from shoal.train.model.buffers import Reconciled
from shoal.train.model.divide import Divided
from shoal.train.model.random_streams import RandomStreams
from shoal.train.model.sync_batchnorm import Presence
from shoal.train.technique.loss import Loss, as_sum_and_count, check_gradient
from shoal.train.technique.precision import Precision
from shoal.world.devices import fetch
from shoal.world.world import World


@dataclass
class Microbatch:
    """One micro-batch on its way through the stages."""

    batch: Batch
    inputs: object
    """What goes into the model."""
    rows: int
    """Samples in the batch."""
    counts: bool
    step: int
    number: int
    """Among all micro-batches of the step."""
    loss: torch.Tensor | None = None
    """Where it was computed, until all micro-batches are through: to look at it would hold up the schedule."""
    count: float = 0.0


@dataclass
class StageJob:
    """What the stages of this worker share."""

    inputs: Inputs
    loss: Loss
    precision: Precision
    streams: RandomStreams
    presence: Presence
    device: torch.device
    spans: Spans
    buffers: Reconciled | None = None
    loads: list[Microbatch] = field(default_factory=list)
    """The micro-batches under way."""
    measures: bool = False
    """True while evaluating: the last stage hands out what the model returned instead of the loss."""

    def load(self, batch: Batch, counts: bool, step: int, number: int) -> Microbatch:
        """A micro-batch made ready."""
        batch = convert(batch, self.device, self.precision.model)
        return Microbatch(batch, self.inputs(batch), length(batch), counts, step, number)


class StageRunner(nn.Module):
    """A stage as torch's runtime calls it: by the number of a micro-batch."""

    def __init__(self, stage: nn.Module, job: StageJob, first: bool, last: bool, size: int) -> None:
        """`size`: samples in a full micro-batch."""
        super().__init__()
        self.stage = stage
        self._job = job
        self._first = first
        self._last = last
        self._size = size

    def forward(self, received: torch.Tensor, *, micro: int) -> object:
        job = self._job
        load = job.loads[micro]
        if not job.measures:
            job.streams.begin(load.step, load.number)
            job.presence.see(load.counts)
        with self._keeping(load), job.precision.context(job.device):
            # Messages have one size, that of a full micro-batch (torch allocates them once); rows beyond this one's are
            # padding.
            output = self.stage(None if self._first else received[: load.rows], load.inputs)
            if job.measures:
                return output
            job.streams.settle()
            if not self._last:
                # Padded again for the way: see `received[: load.rows]` above.
                return lengthen(output, self._size)
            total, count = as_sum_and_count(job.loss(output, load.batch), load.batch)
        check_gradient(total)
        if load.counts:
            load.loss = total.detach()
            load.count = count
        return total

    def _keeping(self, load: Microbatch) -> AbstractContextManager[None]:
        buffers = self._job.buffers
        if buffers is None or self._job.measures:
            return nullcontext()
        return buffers.micro_batch(load.number, load.rows if load.counts else 0)


class Pipelined:
    """The stages of this worker, and how portions go through them."""

    def __init__(
        self,
        world: World,
        job: StageJob,
        schedule: type[Schedule],
        chunks: dict[int, StageRunner],
        divided: Divided,
        size: int,
        microbatches: int,
    ) -> None:
        """`size`: samples in a full micro-batch."""
        assert divided.split is not None
        self._world = world
        self._job = job
        self._chunks = chunks
        self._schedule = schedule
        self._size = size
        self._microbatches = microbatches
        self._passed = divided.split.activations
        """Shape and dtype of one sample of what goes from each stage to the next."""
        self._ties = divided.ties
        self._loss_dtype = divided.loss_dtype
        self._exchange: PipelineGrads | None = None
        self._clock = PassClock(job.spans)
        self.waited = 0
        """Nanoseconds of the newest run in which no stage of this worker had anything to compute."""
        self._trailing: list[torch.Size] | None = None

    @staticmethod
    def of(
        world: World, job: StageJob, schedule: type[Schedule], model: nn.Module, divided: Divided, feed: Feed
    ) -> Pipelined | None:
        """The pipeline of a model that has been divided into stages; None for one that has not."""
        split = divided.split
        if split is None:
            return None
        last = len(split.stages) - 1
        size = -(-feed.global_batch // (feed.size * feed.accumulate))
        chunks = {
            stage.number: StageRunner(
                StageModule(model, stage), job, stage.number == 0, stage.number == last, size
            )
            for stage in split.stages
            if schedule.rank_of(stage.number, world.size) == world.rank
        }
        return Pipelined(world, job, schedule, chunks, divided, size, feed.accumulate)

    @property
    def root(self) -> StageRunner | None:
        """The one stage of this worker; None where it has several."""
        chunks = list(self._chunks.values())
        return chunks[0] if len(chunks) == 1 else None

    def connect(
        self, exchange: PipelineGrads, split_loss: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Once parameters are where the exchange wants them: make torch's stages and their runtime."""
        self._exchange = exchange
        self._split_loss = split_loss
        # When an action fails, torch prints the whole schedule; the error says what went wrong.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        parameters = dict(exchange.module.named_parameters())
        mine = [[list(local(parameters[name]).shape) for name in tie.mine[:1]] for tie in self._ties]
        held = self._world.gather_values(mine)
        self._tie_shapes = [next(rows[i][0] for rows in held if rows[i]) for i in range(len(self._ties))]
        """Of what each holder of a weight holds: all hold equally much."""
        count = self._schedule.stages_per_rank * self._world.size
        self._stages = [
            TimedStage(
                chunk,
                number,
                count,
                self._job.device,
                input_args=self._example(number - 1),
                output_args=self._example(number),
                group=self._world.group,
            )
            for number, chunk in self._chunks.items()
        ]
        for stage in self._stages:
            stage.clock = self._clock
        # torch's runtime sends, receives and runs the actions; which actions, in which order, is ours.
        self._runtime = PipelineRuntime(  # type: ignore[no-untyped-call]
            self._stages,
            self._microbatches,
            # The last stage returns the loss itself; its weight in the step, or 0 for a filler, takes the place of the
            # target.
            loss_fn=lambda total, weight: total * weight,
            # torch would divide by the number of micro-batches; here weights carry the true global count.
            scale_grads=False,
        )
        self._runtime.register_custom_function(ComputationType.REDUCE_GRAD, self._reduce)
        prepare_schedule(
            self._runtime, to_torch(self._schedule.actions(self._world.size, self._microbatches))
        )

    def _reduce(self, action: Any, ctx: Any) -> None:
        """A stage's backward passes are over."""
        del ctx
        assert self._exchange is not None
        with self._clock.working():
            self._exchange.before_reduce()
            stage = next(stage for stage in self._stages if stage.stage_index == action.stage_index)
            # 1: nothing is divided, see `scale_grads`.
            stage.perform_reduce_grad(1)

    def take_loss(self, loss: Loss) -> None:
        """From the next step on."""
        self._job.loss = loss

    def run(self, number: int, portion: Portion, weight: float) -> Tally:
        """Forward and backward of a portion; gradients are on their way when it returns."""
        assert self._exchange is not None
        job = self._job
        job.loads = [
            job.load(batch, counts, number, portion.first + i)
            for i, (batch, counts) in enumerate(zip(portion.batches, portion.counts, strict=True))
        ]
        self._check_shapes(job.loads)
        weights = [
            torch.tensor(weight if load.counts else 0.0, dtype=self._loss_dtype, device=job.device)
            for load in job.loads
        ]
        first = 0 in self._chunks
        for stage in self._stages:  # what the runtime's own `step` does, which would cut batches by itself
            stage.has_backward = True
            stage.clear_runtime_states()
        self._clock.begin()
        try:
            with self._split_loss():
                step_microbatches(
                    self._runtime,
                    # Stages find their batch by the number of the micro-batch; what torch passes as input is a
                    # placeholder.
                    [(self._nothing(),) if first else () for _ in weights],
                    [{"micro": i} for i in range(len(weights))],
                    weights,
                )
        except RuntimeError as error:  # torch wraps whatever a stage raises
            cause = error.__cause__ or error
            if self._schedule.halves_backward and "backward through the graph a second time" in str(cause):
                raise ConfigError(
                    "a layer differentiates inside its forward, and this schedule runs the backward pass in two parts, "
                    "which such a layer cannot; use 1f1b."
                ) from None
            raise cause from None
        self.waited = self._clock.waited()
        job.presence.see(True)
        # Before `collect`: what goes into buckets is the sum over the stages that share a weight.
        self._sum_ties()
        self._exchange.collect()
        losses = fetch([load.loss for load in job.loads if load.loss is not None])
        tally = Tally(sum(losses, 0.0), sum(load.count for load in job.loads))
        job.loads = []
        return tally

    def measure(self, batch: Batch) -> tuple[object, Batch] | None:
        """What the model returns for a batch, and the batch itself; None where this worker has not the last stage."""
        job, world = self._job, self._world
        job.loads = [job.load(batch, True, 0, 0)]
        job.measures = True
        output, carried = None, self._nothing()
        for number in range(self._schedule.stages_per_rank * world.size):
            owner = self._schedule.rank_of(number, world.size)
            if number in self._chunks:
                output = self._chunks[number](carried, micro=0)
            if number < len(self._passed):
                mine = output.contiguous() if output is not None and owner == world.rank else None
                # Sequences of another length than in training will do here.
                shape = world.gather_values([] if mine is None else list(mine.shape))[owner]
                # Everybody takes part in the broadcast, which is a collective of the whole pipeline; only the next
                # stage uses it.
                room = torch.empty(shape, dtype=self._passed[number][1], device=job.device)
                carried = room if mine is None else mine
                world.broadcast(carried, owner).wait()
        loads = job.loads
        job.loads = []
        job.measures = False
        last = self._schedule.stages_per_rank * world.size - 1
        return (output, loads[0].batch) if last in self._chunks else None

    def _example(self, number: int) -> torch.Tensor:
        """What leaves stage `number`, as a tensor without memory."""
        if number < 0:
            return self._nothing()
        if number == len(self._passed):
            return torch.empty((), dtype=self._loss_dtype, device="meta", requires_grad=True)
        shape, dtype = self._passed[number]
        return torch.empty((self._size, *shape), dtype=dtype, device="meta", requires_grad=True)

    def _nothing(self) -> torch.Tensor:
        """What torch's runtime passes to the first stage, which takes its inputs from the batch."""
        return torch.zeros(1, dtype=torch.float32, device=self._job.device)

    def _check_shapes(self, loads: Sequence[Microbatch]) -> None:
        for load in loads:
            shapes = [t.shape[1:] for t in tree_leaves(arguments(load.inputs)) if isinstance(t, torch.Tensor)]
            if self._trailing is None:
                self._trailing = shapes
            if shapes != self._trailing:
                raise ConfigError(
                    f"a pipeline needs samples of one shape: a micro-batch of step {load.step + 1} has "
                    f"{[list(s) for s in shapes]} where the first had {[list(s) for s in self._trailing]}; pad them "
                    "to one length in collate=."
                )

    def _sum_ties(self) -> None:
        """A weight that several stages hold has the sum of their gradients everywhere, or none anywhere."""
        exchange = self._exchange
        assert exchange is not None
        for tie, shape in zip(self._ties, self._tie_shapes, strict=True):
            # One element more says whether any stage had a gradient at all; without one the optimizer leaves the weight
            # alone.
            total = torch.zeros(math.prod(shape) + 1, dtype=tie.dtype, device=self._job.device)
            for name in tie.mine:
                gradient = exchange.get_grad(name)
                if gradient is not None:
                    total[:-1] += gradient.reshape(-1)
                    total[-1] = 1.0  # somebody has one
            self._world.all_reduce(total).wait()
            for name in tie.mine:
                exchange.set_grad(name, total[:-1].view(shape) if total[-1] else None)


def lengthen(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor of `size` rows: what is missing is zero.

    >>> lengthen(torch.tensor([1, 2]), 4)
    tensor([1, 2, 0, 0])
    """
    if tensor.shape[0] == size:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(size - tensor.shape[0], *tensor.shape[1:])])
