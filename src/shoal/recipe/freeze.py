"""Parameters that do not learn, or not yet: `freeze("encoder.*")`, and `freeze("encoder.*", until=200)`.

Frozen for good, a parameter has no gradient, no optimizer state and no place in a bucket, as if the script had said
`requires_grad_(False)`. Frozen until a step, it has its place from the beginning, and no worker lays anything out
anew in the middle of a run: it has no gradient until then, or, where units of zero3 and stages of a pipeline count on
one, its gradient is withheld. What is computed is what one process computes that unfreezes the
parameter after so many steps, with an optimizer that meets it then for the first time.

Wrapping a model in torch's DDP and unfreezing a layer later lets the workers diverge in silence: DDP has no hook on it.

When to use: a pretrained model's lower layers are good as they are, or must not be shaken before a new head has learned
something. Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification", ACL 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.errors import ConfigError
from shoal.recipe.contract import Preparation, Recipe, Running, RunView
from shoal.recipe.names import matching
from shoal.types import Promise


@dataclass(frozen=True)
class Freeze(Recipe):
    """Parameters whose names fit do not learn; `until`: so many steps, and learn from then on."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str] = "parameters do not learn, for good or for so many steps"
    names: str
    """A pattern such as "encoder.*", or several, separated by commas."""
    until: int = 0
    """They learn after so many steps; 0: never."""

    def __post_init__(self) -> None:
        if self.until < 0:
            raise ConfigError(f"freeze: until={self.until}; it is a number of steps, or 0 for good.")

    def prepare(self, preparation: Preparation) -> None:
        """Refuse a pattern that fits nothing; freeze for good what is to stay frozen."""
        parameters = dict(preparation.model.named_parameters())
        for name in matching("freeze", self.names, parameters):
            if self.until == 0:
                parameters[name].requires_grad_(False)

    def run(self, view: RunView) -> Running:
        return Freezing(self, view) if self.until else Running()


class Freezing(Running):
    """Lets parameters learn when it is time, and not before."""

    def __init__(self, asked: Freeze, view: RunView) -> None:
        chosen = set(matching("freeze", asked.names, view.sizes))
        learning = {n: p for n, p in view.exchange.module.named_parameters() if p.requires_grad}
        self._parameters = {name: p for name, p in learning.items() if view.first(name) in chosen}
        self._until = asked.until
        self._exchange = view.exchange
        # Units of zero3 and stages of a pipeline count on a gradient for what learned when they were made.
        self._withholds = view.exchange.cuts_parameters or view.mesh.stages.size > 1
        self._learns = True

    def before_step(self, step: int) -> None:
        if self._withholds or self._learns == (step >= self._until):
            return
        self._learns = not self._learns
        for parameter in self._parameters.values():
            parameter.requires_grad_(self._learns)

    def on_gradients(self, step: int, mean: float) -> None:
        del mean
        if self._withholds and step < self._until:
            self._exchange.withhold(set(self._parameters))
