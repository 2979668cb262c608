"""Elastic weight consolidation: `Ewc(100.0, data=old)` holds on to weights that an old task needs.

The penalty is strength / 2 · Σ F (w - w₀)², where w₀ are the weights at the start and F is the diagonal of the
empirical Fisher information over the old data: the mean of the square of each sample's gradient. Each worker
squares the gradients of its own samples, one by one, and squares are summed: what one process finds. Squares of
gradients that workers have averaged before are another thing, and 66 % off where it was measured.

The penalty goes through `penalty=` of `Run`, exactly once a step under every strategy; where workers hold parts of
the model it costs what `penalty=` costs. F and w₀ are found before the first step, from the weights that the model
has then, at every start of the program: give those of the old task with `start(path)` before it, or make the model
with them.

Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017.

When to use: training on new data, where the old is not kept, or should not be trained on again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shoal.call import call_model
from shoal.data.source import Source
from shoal.errors import ConfigError
from shoal.recipe.contract import Preparation, Recipe, Running, RunView


@dataclass(frozen=True)
class Ewc(Recipe):
    """A penalty on moving the weights that old data needs."""

    summary: ClassVar[str] = "hold on to weights that an old task needs, by their Fisher information"
    adds_penalty: ClassVar[bool] = True
    needs_values: ClassVar[bool] = True
    strength: float
    data: Source | None = None
    """Samples of the old task; given in an object, as `recipes=[Ewc(100.0, data=old)]`."""
    samples: int = 1000
    """So many of them at most, evenly spread."""

    def __post_init__(self) -> None:
        if self.strength < 0 or self.samples < 1:
            raise ConfigError(
                f"ewc: strength={self.strength:g}, samples={self.samples}; strength is not negative, samples 1 or more."
            )

    def prepare(self, preparation: Preparation) -> Anchor:
        """Find what to hold on to, and how much."""
        if self.data is None:
            raise ConfigError(
                "ewc: data= is missing, the samples of the old task; give the recipe as an object, as in "
                "recipes=[Ewc(100.0, data=old)] with Ewc from shoal.recipe.ewc."
            )
        found = fisher(preparation, self.data, self.samples)
        weights = {name: preparation.model.get_parameter(name).detach().clone() for name in found}
        return Anchor(self.strength, weights, found)

    def run(self, view: RunView) -> Running:
        assert isinstance(view.prepared, Anchor)
        return view.prepared


class Anchor(Running):
    """Weights to hold on to."""

    def __init__(
        self, strength: float, weights: Mapping[str, torch.Tensor], importance: Mapping[str, torch.Tensor]
    ) -> None:
        self._strength = strength
        self._weights = weights
        self._importance = importance

    def penalty(self, module: nn.Module) -> torch.Tensor:
        named = dict(module.named_parameters())
        terms = [
            (importance * (named[name] - self._weights[name]).square()).sum()
            for name, importance in self._importance.items()
        ]
        return torch.stack(terms).sum() * (self._strength / 2)


def fisher(preparation: Preparation, data: Source, most: int) -> dict[str, torch.Tensor]:
    """The mean of squared gradients of single samples, over all workers, by parameter. Collective."""
    model, world = preparation.model, preparation.together
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in learning.items()}
    count = min(most, len(data))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # no dropout, and statistics of batch normalisation as they are
    try:
        for number in range(world.rank, count, world.size):
            batch = preparation.batch([data[number * len(data) // count]])
            loss = preparation.sample_loss(call_model(model, preparation.inputs(batch)), batch)
            gradients = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
            for name, gradient in zip(learning, gradients, strict=True):
                if gradient is not None:
                    sums[name] += gradient.square()
    finally:
        for module, training in modes:
            module.training = training
    for value in sums.values():
        world.all_reduce(value).wait()
        value /= count
    return sums
