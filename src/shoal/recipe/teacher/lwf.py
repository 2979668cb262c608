"""Learning without forgetting: while a model learns something new, what it would have said before is its teacher.

The teacher is the model as it was given to the run, before its first step: give `model=` with the weights that know
the old task. No old data is needed.

When to use: old data is gone, and the classes are the same or the head has room for all of them.
Li and Hoiem, "Learning without forgetting", ECCV 2016.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.recipe.contract import Preparation, Recipe, Running, RunView
from shoal.recipe.teacher.distil import Distil, Distilling


@dataclass(frozen=True)
class Lwf(Recipe):
    """`lwf(0.5)`: the model's former predictions count half."""

    summary: ClassVar[str] = "keep the predictions that the model made before the run"
    adds_loss: ClassVar[bool] = True
    needs_values: ClassVar[bool] = True
    alpha: float = 0.5
    temperature: float = 2.0
    place: str = "auto"
    ignore: int = -100
    classes: int = 0
    """The old classes are the first so many; 0: all are compared, also those that are new."""

    def __post_init__(self) -> None:
        self._distil(nn.Identity())

    def prepare(self, preparation: Preparation) -> object:
        """The model as it is now: whole, before anything is cut; and how it is called."""
        return copy.deepcopy(preparation.model), preparation.inputs

    def run(self, view: RunView) -> Running:
        """As any teacher."""
        assert isinstance(view.prepared, tuple)
        model, inputs = view.prepared
        asked = self._distil(model)
        return Distilling(asked, asked.make_teacher(view), view, inputs)

    def _distil(self, teacher: nn.Module) -> Distil:
        return Distil(
            teacher,
            self.alpha,
            self.temperature,
            place=self.place,
            ignore=self.ignore,
            classes=self.classes,
        )
