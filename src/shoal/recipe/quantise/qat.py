"""Training with rounding: the model learns weights that lose little when they are stored in 8 or 4 bits.

Weights are rounded by output channel, inputs of layers by a range that all workers agree on after each step: the
extremes over all samples of the global batch, moved towards by a share. Within a step ranges stand still, so every
micro-batch on every worker is rounded alike, and the run is that of one process.

When to use: the model is to be served in whole numbers, and rounding it afterwards costs accuracy.
Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only inference", CVPR 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.recipe.contract import Preparation, Recipe, Running, RunView
from shoal.recipe.quantise.rounding import (
    ROUNDED,
    RoundingState,
    begin_rounding,
    can_round,
    round_weight,
)

_BITS = {"int8": 8, "int4": 4}
_ALONE = "ranges are agreed between steps, and workers do not meet there; use ddp, a zero or shared"


@dataclass(frozen=True)
class Qat(Recipe):
    """`qat(int8)`: Linear and Conv2d compute with rounded weights and inputs from step `begin` on."""

    summary: ClassVar[str] = "train with weights and activations rounded to 8 or 4 bits"
    needs_values: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, str]] = {
        "uses_servers": _ALONE,
        "updates_alone": _ALONE,
        "tensor": "the channels of a layer that tpN cuts are on several workers, and each would round its part by a "
        "scale of its own; leave tpN out",
    }
    to: str = "int8"
    begin: int = 0
    """The step from which numbers are rounded; ranges are learned before."""
    activations: bool = True
    """Inputs of layers too, to 8 bits; else weights only."""
    share: float = 0.1
    """How far a range moves in one step to what the step has seen."""
    skip: str = ""
    """Layers to leave alone, by name pattern, several joined by "/"."""
    chosen: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The layers, by name in the whole model."""

    def __post_init__(self) -> None:
        if self.to not in _BITS:
            raise ConfigError(f"qat({self.to}): it is int8 or int4.")
        if self.begin < 0 or not 0 < self.share <= 1:
            raise ConfigError(
                f"qat: begin={self.begin}, share={self.share:g}; begin is 0 or more, share above 0 and at most 1."
            )

    def prepare(self, preparation: Preparation) -> object:
        """Let layers round; their parameters and names stay."""
        model = preparation.model
        skipped = [pattern for pattern in self.skip.split("/") if pattern]
        shared = _shared_with_others(model)
        self.chosen[:] = [
            name
            for name, module in model.named_modules()
            if can_round(module)
            and id(module.weight) not in shared
            and not any(fnmatchcase(name, pattern) for pattern in skipped)
        ]
        if not self.chosen:
            raise ConfigError(
                f"qat: {type(model).__name__} has no Linear or Conv2d to round; leave qat out, or look at skip=."
            )
        for name in self.chosen:
            begin_rounding(model.get_submodule(name), RoundingState(_BITS[self.to], self.activations))
        return None

    def run(self, view: RunView) -> Running:
        """Watch the layers that are here."""
        return Rounding(self, view)

    def export(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights on their grid, as the model has computed with them."""
        rounded = {f"{name}.weight" for name in self.chosen}
        return {
            name: round_weight(value, _BITS[self.to]) if name in rounded else value
            for name, value in state.items()
        }


class Rounding(Running):
    """Ranges of one run."""

    def __init__(self, asked: Qat, view: RunView) -> None:
        self._asked = asked
        self._world = view.mesh.world
        here = [(name, m) for name, m in view.model.named_modules() if isinstance(m, ROUNDED)]
        self._here: dict[str, RoundingState] = {
            view.first(f"{name}.weight").removesuffix(".weight"): module.rounding for name, module in here
        }
        self._ranges: dict[str, tuple[float, float]] = {}
        """Of all layers of the whole model, also those that another stage has."""

    def before_step(self, step: int) -> None:
        """What a step before has seen that did not count is forgotten."""
        for state in self._here.values():
            state.forget()
            state.on = step >= self._asked.begin

    def published(self, step: int) -> None:
        """Agree on what this step has seen. Collective."""
        del step
        if not self._asked.activations:
            return
        nothing = (float("inf"), float("-inf"))
        mine = [self._here[name].seen() if name in self._here else nothing for name in self._asked.chosen]
        everyone = self._world.gather_numbers([number for low, high in mine for number in (-low, high)])
        highest = everyone.amax(0).tolist()
        for name, low, high in zip(self._asked.chosen, highest[::2], highest[1::2], strict=True):
            if -low <= high:  # a layer that did not run keeps its range
                self._move(name, -low, high)
        self._hand_out()

    def state(self) -> dict[str, object]:
        """Ranges by layer."""
        return {"ranges": {name: list(found) for name, found in self._ranges.items()}}

    def go_on(self, state: Mapping[str, object] | None) -> str:
        """Take up ranges."""
        if state is None:
            return "qat: the checkpoint knows no ranges; they are learned anew"
        found = state["ranges"]
        assert isinstance(found, dict)
        self._ranges = {name: (float(low), float(high)) for name, (low, high) in found.items()}
        self._hand_out()
        for rounding in self._here.values():
            rounding.on = True
        return ""

    def _move(self, name: str, low: float, high: float) -> None:
        before = self._ranges.get(name)
        if before is not None:
            share = self._asked.share
            low = before[0] + share * (low - before[0])
            high = before[1] + share * (high - before[1])
        self._ranges[name] = (low, high)

    def _hand_out(self) -> None:
        for name, rounding in self._here.items():
            rounding.range = self._ranges.get(name)


def _shared_with_others(model: nn.Module) -> set[int]:
    """Weights that a layer shares with one of another kind, such as an embedding: rounded they would be two."""
    by_weight: dict[int, set[bool]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            by_weight.setdefault(id(parameter), set()).add(can_round(module))
    return {weight for weight, kinds in by_weight.items() if len(kinds) > 1}
