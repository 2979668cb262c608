"""What the user asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from shoal.data.batch import Collate, Inputs
from shoal.data.columns import Columns
from shoal.data.source import Source, Stream
from shoal.errors import ConfigError
from shoal.optimizer import MakeOptimizer
from shoal.train.loss import Loss
from shoal.train.model import MODEL, MakeModel


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
    balance: str = "even"
    columns: Columns = field(default_factory=dict)
    loader_workers: int = 0
    on_nan: str = "stop"
    deterministic: bool = False
    recompute: str | None = None
    batchnorm: str = "own"
    tensor_rules: Mapping[str, str] = field(default_factory=dict)


def check_kinds(order: Order) -> None:
    """Refuse fields of another kind than a run can use."""
    if not isinstance(order.model, nn.Module) and not callable(order.model):
        raise ConfigError(f"model= is a {type(order.model).__name__}; {MODEL}")
    if not callable(order.optimizer):
        raise ConfigError(
            f"optimizer= is a {type(order.optimizer).__name__}; give a function of the parameters that returns "
            "a torch optimizer, such as lambda params: torch.optim.AdamW(params, lr=3e-4)."
        )
    if not callable(order.loss):
        raise ConfigError(
            f"loss= is a {type(order.loss).__name__}; give a function (output, batch) -> (sum, count)."
        )
    if not isinstance(order.tensor_rules, Mapping):
        raise ConfigError(
            f'tensor_rules= is a {type(order.tensor_rules).__name__}; give a dict such as {{"*.up": "column"}}.'
        )
    if not isinstance(order.columns, Mapping):
        raise ConfigError(
            f'columns= is a {type(order.columns).__name__}; give a dict such as {{"length": lengths}}.'
        )
    for name, given in (("inputs", order.inputs), ("collate", order.collate)):
        if given is not None and not callable(given):
            raise ConfigError(f"{name}= is a {type(given).__name__}; give a function.")
