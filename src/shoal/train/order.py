"""What the user asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from shoal.data.batch import Collate, Inputs
from shoal.data.columns import Columns
from shoal.data.source import Source, Stream
from shoal.optimizer import MakeOptimizer
from shoal.train.loss import Loss
from shoal.train.model import MakeModel


@dataclass(frozen=True)
class Order:
    """What the user asked for, after overrides."""

    model: nn.Module | MakeModel
    loss: Loss
    optimizer: MakeOptimizer
    data: Source | Stream
    global_batch: int
    strategy: str = "ddp"
    precision: str = "fp32"
    clip: float | str | None = None
    accumulate: int = 1
    seed: int = 0
    inputs: Inputs | None = None
    collate: Collate | None = None
    shuffle: bool = True
    partition: str = "block"
    columns: Columns = field(default_factory=dict)
    loader_workers: int = 0
    on_nan: str = "stop"
    deterministic: bool = False
    recompute: str | None = None
    batchnorm: str = "own"
    tensor_rules: Mapping[str, str] = field(default_factory=dict)
