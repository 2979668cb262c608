"""What a loader is asked for, and what it hands out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.data.augment.chain import Chain
from shoal.data.batch import Batch, Collate
from shoal.data.columns import Columns
from shoal.data.dataloader import WorkerInit
from shoal.data.sampler import Sampler
from shoal.partition.base import Partition
from shoal.partition.block import BlockPartition


@dataclass(frozen=True)
class Feed:
    """What a loader needs to know."""

    data: Any
    """A `Source`, or a `Stream`."""
    global_batch: int
    rank: int
    size: int
    accumulate: int = 1
    seed: int = 0
    shuffle: bool | str = True
    """Or blocks of neighbours: "blocks(65536)"."""
    collate: Collate | None = None
    workers: int = 0
    """Processes that prepare batches ahead; 0 prepares them in the training process when they are needed."""
    fill: bool = False
    """Give a micro-batch without samples the first sample of its step as a filler, which counts nothing."""
    partition: Partition = field(default_factory=BlockPartition)
    columns: Columns = field(default_factory=dict)
    sampler: Sampler | None = None
    """Gives the order of samples, or whole batches, instead of seed and `shuffle`."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is short."""
    pin_memory: bool = False
    """Batches that loader processes prepare come in page-locked memory."""
    worker_init: WorkerInit | None = None
    """Called in each loader process, with its number, when it starts."""
    augment: Chain | None = None
    """What is done to samples before they count; None in evaluation."""

    @property
    def parts(self) -> int:
        """Micro-batches of a step, over all workers."""
        return self.size * self.accumulate

    @property
    def first(self) -> int:
        """The number of this worker's first micro-batch among all of a step."""
        return self.rank * self.accumulate


@dataclass(frozen=True)
class Portion:
    """One worker's part of one step."""

    epoch: int
    samples: int
    """Samples in the whole global batch."""
    batches: tuple[Batch | None, ...]
    """This worker's micro-batches; None where a step has no samples for one."""
    counts: tuple[bool, ...]
    """Which of them hold samples of their own; the others are None, or fillers."""
    own: int
    """Samples in this part of it."""
    first: int
    """Number of the first of them among all micro-batches of the step."""
