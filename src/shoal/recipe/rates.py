"""Learning rates by the names of parameters: `rate("encoder.*", 0.1)` and `layer_decay(0.75)`.

The groups of the user's optimizer are split by these factors, on every worker alike; schedules go on to move all of
them. So what a factor is worth is the same under every strategy, and for every optimizer that has groups.

When to use: fine-tuning, where lower layers should move less than a new head. Howard and Ruder, "Universal Language
Model Fine-tuning for Text Classification", ACL 2018; Clark et al., "ELECTRA", ICLR 2020 (decay by layer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.optimizer import MakeOptimizer
from shoal.recipe.contract import Preparation, Recipe
from shoal.recipe.names import matching


@dataclass(frozen=True)
class Rate(Recipe):
    """Parameters whose names fit learn at so many times the optimizer's rate."""

    summary: ClassVar[str] = "a factor on the learning rate of parameters, by name"
    names: str
    """A pattern such as "encoder.*", or several, separated by commas."""
    factor: float

    def __post_init__(self) -> None:
        if self.factor < 0:
            raise ConfigError(f"rate: factor={self.factor:g}; a learning rate is not negative.")

    def prepare(self, preparation: Preparation) -> None:
        """Refuse a pattern that fits nothing."""
        matching("rate", self.names, dict(preparation.model.named_parameters()))

    def learning_rates(self, names: list[str]) -> Mapping[str, float]:
        return dict.fromkeys(matching("rate", self.names, names), self.factor)


@dataclass(frozen=True)
class LayerDecay(Recipe):
    """The last layer learns at the optimizer's rate, and each layer below it at `factor` times that of the next.

    A layer is a part of the model that stands at the top, or an entry of a list of layers: in the order in which the
    model has them.
    """

    summary: ClassVar[str] = "learning rates that fall layer by layer, from the last to the first"
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise ConfigError(
                f"layer_decay: factor={self.factor:g}; it is above 0 and at most 1, such as 0.75."
            )

    def learning_rates(self, names: list[str]) -> Mapping[str, float]:
        layers = list(dict.fromkeys(layer_of(name) for name in names))
        return {name: self.factor ** (len(layers) - 1 - layers.index(layer_of(name))) for name in names}


def layer_of(name: str) -> str:
    """The layer that a parameter is in: up to the last number in its name, or the part at the top.

    >>> layer_of("encoder.layers.3.self_attn.out_proj.weight"), layer_of("head.weight"), layer_of("scale")
    ('encoder.layers.3', 'head', 'scale')
    """
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


def split_groups(
    make: MakeOptimizer, model: nn.Module, factors: Mapping[str, float], same: Mapping[str, str]
) -> MakeOptimizer:
    """The user's optimizer with its groups split by factors on their learning rates.

    >>> model = nn.Linear(2, 2)
    >>> made = split_groups(lambda p: torch.optim.SGD(p, lr=1.0), model, {"bias": 0.5}, {})
    >>> [(group["lr"], len(group["params"])) for group in made(list(model.parameters())).param_groups]
    [(1.0, 1), (0.5, 1)]
    """
    levels = sorted({1.0, *factors.values()}, reverse=True)  # the same on every worker, whatever it holds

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        factor = {id(p): factors.get(same.get(name, name), 1.0) for name, p in model.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            for level in levels:
                mine = [p for p in group["params"] if factor.get(id(p), 1.0) == level]
                groups.append({**group, "params": mine, "lr": group["lr"] * level})
        optimizer.param_groups[:] = groups
        return optimizer

    return made
