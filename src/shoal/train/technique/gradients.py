"""The gradients of a step, between backward and update: what `run.gradients` hands to the user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from shoal.errors import ConfigError
from shoal.exchange.contract import Exchange, LocalShard
from shoal.torch_private import foreach_mul_


class Gradients(Mapping[str, torch.Tensor]):
    """The mean gradient of the global batch, by parameter name: this worker's shard of it.

    A shard is the memory that the update reads: change it in place. Parameters without a gradient are absent, and so
    are those of which nothing is updated here. Where the whole parameter is, the shard has its shape; else it is flat,
    or has its rows, and `start` tells which element is its first.

    >>> gradients = Gradients([LocalShard("weight", 6, torch.tensor([3.0, 4.0]))])
    >>> list(gradients), gradients["weight"].norm().item(), gradients.start("weight")
    (['weight'], 5.0, 6)
    """

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self._shards = {shard.name: shard for shard in shards if shard.tensor.numel()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._shards[name].tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def start(self, name: str) -> int:
        """The first element of a shard, counted in what tensor parallel has left of the parameter here."""
        return self._shards[name].start


OnGradients = Callable[[Gradients], object]


def show_gradients(exchange: Exchange, mean: float, function: OnGradients) -> None:
    """Make gradients the mean of the global batch, and let the user's function see and change them."""
    shards = exchange.gradient_shards()
    if mean != 1.0 and shards:
        foreach_mul_([shard.tensor for shard in shards], mean)
    with torch.no_grad():
        function(Gradients(shards))


def check_gradients(exchange: Exchange, function: OnGradients, busy: bool) -> None:
    """Refuse to show gradients where they are not to be seen."""
    if not callable(function):
        raise ConfigError(
            f"run.gradients takes a function of the gradients, and {function!r} is a {type(function).__name__}; give "
            "one, as in: with run.gradients(look): ..."
        )
    if busy:
        raise ConfigError("run.gradients: one function sees gradients already; call both from one.")
    if exchange.uses_servers:
        raise ConfigError(
            "run.gradients: gradients are summed on servers, and no worker has them; use ddp, a zero or shared."
        )
    if exchange.tables.names:
        raise ConfigError(
            f"run.gradients: the rows of '{exchange.tables.names[0]}' have gradients of their own, not shown here; "
            "use nn.Embedding."
        )
