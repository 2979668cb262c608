"""What a step works with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from shoal.balance.base import Balance
from shoal.data.batch import Inputs, fits_as_it_is
from shoal.data.loader import Loader, Portion
from shoal.data.stream import StreamLoader
from shoal.exchange.base import Exchange
from shoal.report.meter import Meter
from shoal.train.balancing import Balancing, key_for
from shoal.train.batchnorm import Presence
from shoal.train.clip import Clip
from shoal.train.loss import Loss
from shoal.train.pipelined import Pipelined
from shoal.train.precision import LossScale, Precision
from shoal.train.record import Recorder
from shoal.train.streams import Streams
from shoal.train.whole import Whole
from shoal.world.mesh import Mesh
from shoal.world.world import World


@dataclass
class Parts:
    """Made by build.py; only `scale` and `count_per_sample` change from step to step."""

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
    streams: Streams
    presence: Presence
    split_loss: Callable[[], AbstractContextManager[None]] | None
    """Around forward and backward passes: lets a loss take logits that are cut over the tensor axis."""
    precision: Precision
    scale: LossScale
    clip: Clip | None
    skip_nan: bool
    meter: Meter
    recorder: Recorder | None
    count_per_sample: float
    """As in the last step. It tells the count of this step before it is known, and in most runs exactly."""

    def memo(self) -> list[float] | None:
        """What a worker that joins in the middle of the run must know to compute what the others do."""
        return (
            [self.count_per_sample, self.scale.value, self.scale.good_steps] if self.exchange.apart else None
        )

    def look_ahead(self, step: int, portion: Portion) -> None:
        """This worker's batches of a step are here: let the exchange see those of the next, if it can use them."""
        if self.exchange.tables.foresees(step + 1) and isinstance(self.loader, Loader):
            coming = self.loader.peek(step + 1).batches
            self.exchange.tables.foresee(step + 1, portion.batches, coming)

    def recall(self, told: list[float] | None) -> None:
        """Go on as another worker's memo says."""
        if told is not None:
            self.exchange.rescale(
                float(told[1]) / self.scale.value
            )  # what has waited was of the scale before
            self.count_per_sample, self.scale.value = float(told[0]), float(told[1])
            self.scale.good_steps = int(told[2])

    def __post_init__(self) -> None:
        self.world: World = self.mesh.world
        """Everybody."""
        self.savers: World = self.mesh.data if self.exchange.apart else self.mesh.world
        """Those who save and load together."""
        self.converts = not fits_as_it_is(self.world.device, self.precision.model)
        """Whether batches have to be moved or cast."""
        key = key_for(self.whole.shape, self.world)
        self.balancing = Balancing(self.balance, self.mesh, self.loader, self.exchange, key)
        """How much of a step each worker gets."""
