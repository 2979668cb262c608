"""All recipes of a run: one object that a step, a checkpoint and an evaluation talk to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from shoal.data.batch import Batch
from shoal.errors import ConfigError, TornStep
from shoal.exchange.contract import ExtraState
from shoal.optimizer import MakeOptimizer
from shoal.recipe.averages import Averages
from shoal.recipe.contract import Preparation, Recipe, Running, RunView
from shoal.recipe.rates import split_groups
from shoal.world.world import World

Loss = Callable[[object, Batch], object]
Summed = Callable[[object, Batch], tuple[torch.Tensor, float]]
Penalty = Callable[[nn.Module], torch.Tensor]


class Recipes:
    """What a run's recipes do, moment by moment. Only those are called that act then."""

    def __init__(self, asked: Sequence[tuple[str, Recipe]] = (), summed: Summed | None = None) -> None:
        """`asked`: by the names under which they keep their state, in the order in which they act. `summed`: what a
        loss returned, as a sum and a count."""
        self._summed = summed
        self._asked = list(asked)
        self._prepared: dict[str, object] = {}
        self._running: dict[str, Running] = {}
        self.learning: tuple[str, ...] = ()
        """Parameters of the whole model that learn, at some time."""
        self.averages: Averages | None = None
        """Weights beside the weights."""
        self._torn = False
        """Whether a step was left while recipes acted on its update."""
        self._acting: dict[str, list[Running]] = {moment: [] for moment in _MOMENTS}

    # Before the first step

    @property
    def needs_values(self) -> bool:
        """Whether some of them read values of the model before it is cut."""
        return any(recipe.needs_values for _, recipe in self._asked)

    def prepare(self, preparation: Preparation) -> None:
        """Change the whole model. Every worker calls it."""
        for name, recipe in self._asked:
            self._prepared[name] = recipe.prepare(preparation)
        named = preparation.model.named_parameters()
        self.learning = tuple(name for name, p in named if p.requires_grad)

    def optimizer(self, make: MakeOptimizer, model: nn.Module, same: Mapping[str, str]) -> MakeOptimizer:
        """What makes the optimizer, with the learning rates that recipes want. `same`: as of `RunView`."""
        factors: dict[str, float] = {}
        for _, recipe in self._asked:
            for name, factor in recipe.learning_rates(list(self.learning)).items():
                factors[name] = factors.get(name, 1.0) * factor
        return split_groups(make, model, factors, same) if factors else make

    def run(self, view: RunView) -> None:
        """The exchange is there. Every worker calls it."""
        for name, recipe in self._asked:
            self._running[name] = recipe.run(replace(view, name=name, prepared=self._prepared[name]))
        for running in self._running.values():
            if isinstance(running, Averages):
                self.averages = running
        for moment in _MOMENTS:
            acts = [r for r in self._running.values() if getattr(type(r), moment) is not _NOTHING[moment]]
            self._acting[moment] = acts

    def running(self, name: str) -> Running:
        """One of them at work, by the name under which it keeps its state."""
        return self._running[name]

    def around(self, loss: Loss) -> Loss:
        """The loss with what recipes add in training."""
        summed = self._summed
        if summed is None or not any(recipe.adds_loss for _, recipe in self._asked):
            return loss

        def trained(output: object, batch: Batch) -> object:
            returned = loss(output, batch)
            if not torch.is_grad_enabled():  # an evaluation measures the loss alone
                return returned
            total, count = summed(returned, batch)
            for running in self._running.values():
                total, count = running.on_loss(output, batch, total, count)
            return total, count

        return trained

    def penalty(self, given: Penalty | None) -> Penalty | None:
        """The user's penalty on weights with those of recipes; None where there is none."""
        adding = [name for name, recipe in self._asked if recipe.adds_penalty]
        if not adding:
            return given

        def together(module: nn.Module) -> torch.Tensor:
            found = [self._running[name].penalty(module) for name in adding]
            return torch.stack([*found, *([] if given is None else [given(module)])]).sum()

        return together

    # Moments of a step

    def before_step(self, step: int) -> None:
        """Parameters are fresh."""
        for running in self._acting["before_step"]:
            running.before_step(step)

    def on_gradients(self, step: int, mean: float) -> None:
        """Gradients are summed, and not yet clipped; × `mean` they are the mean gradient."""
        if self._acting["on_gradients"]:
            with torch.no_grad():
                for running in self._acting["on_gradients"]:
                    running.on_gradients(step, mean)

    def applied(self, step: int) -> None:
        """What this worker updates is new; others see it later."""
        if self._acting["applied"]:
            self._torn = True
            with torch.no_grad():
                for running in self._acting["applied"]:
                    running.applied(step)
            self._torn = False

    def check_not_torn(self, world: World) -> None:
        """After a step was cut short: refuse to go on where that was among what recipes do to an update. Collective."""
        if self._acting["applied"] and world.gather_numbers([float(self._torn)]).any():
            raise TornStep(
                "the step was cut short while recipes acted on its update, on some workers or all; start from a "
                "checkpoint."
            )

    def published(self, step: int) -> None:
        """Every worker sees the new parameters."""
        for running in self._acting["published"]:
            running.published(step)

    def report(self) -> dict[str, float]:
        """Numbers for the step's report."""
        found: dict[str, float] = {}
        for running in self._acting["report"]:
            found.update(running.report())
        return found

    # Looking at the model

    @contextmanager
    def in_place(self, weights: str | None) -> Iterator[None]:
        """While it lasts, the model has the weights that are asked for. Collective."""
        if weights in (None, EXPORT):
            yield
        elif self.averages is None:
            raise ConfigError(f"weights='{weights}': this run keeps no average; give Run ema=0.999.")
        else:
            with self.averages.in_place(weights):
                yield

    def export(self, weights: str | None, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A whole state dict, handed over if `weights` asks for that."""
        if weights == EXPORT and state:
            for _, recipe in reversed(self._asked):
                state = recipe.export(state)
        return state

    # What a checkpoint keeps

    def extras(self) -> list[ExtraState]:
        """State per element, as it lies on this worker."""
        return [extra for running in self._running.values() for extra in running.extras()]

    def state(self) -> dict[str, object]:
        """The rest of it, by recipe."""
        found = {name: running.state() for name, running in self._running.items()}
        return {name: state for name, state in found.items() if state is not None}

    def go_on(self, state: Mapping[str, Mapping[str, object]]) -> list[str]:
        """After `extras` have been filled from a checkpoint; what is to be said."""
        said = [running.go_on(state.get(name)) for name, running in self._running.items()]
        return [sentence for sentence in said if sentence]


EXPORT = "export"
"""What `weights=` of `run.state_dict` says for a state dict without the traces of recipes."""

_MOMENTS = ("before_step", "on_gradients", "applied", "published", "report")
_NOTHING = {name: getattr(Running, name) for name in vars(Running) if not name.startswith("_")}


def named(recipes: Sequence[Recipe], name_of: Callable[[Recipe], str]) -> list[tuple[str, Recipe]]:
    """Recipes by the names under which they keep their state: prune, and prune.2 for a second one."""
    found: list[tuple[str, Recipe]] = []
    taken: dict[str, int] = {}
    for recipe in recipes:
        name = name_of(recipe)
        taken[name] = taken.get(name, 0) + 1
        found.append((name if taken[name] == 1 else f"{name}.{taken[name]}", recipe))
    if sum(count for name, count in taken.items() if name in ("ema", "swa")) > 1:
        raise ConfigError(
            "a run keeps one average of its weights: give one ema or swa, by recipes= or by ema=."
        )
    return found
