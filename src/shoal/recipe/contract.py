"""The contract of a recipe: what a run trains for, beside the loss: sparse weights, frozen layers, averages.

A recipe has two halves. `Recipe` is what the user asks for: a frozen dataclass of options, with facts that are known
before anything runs. `Running` is the recipe at work in one run: it owns state, and acts at these moments:

    Recipe.feed(feed)              once, before anything else: other data, or another order of it
    Recipe.prepare(preparation)    once, before anything is cut: the whole model, the same on every worker
    Recipe.run(view)               once, when the exchange is there and before a checkpoint is read: makes `Running`
    before_step(step)              each step, when parameters are fresh and before the forward passes
    on_loss(output, batch, ...)    each micro-batch of a training step: another term beside the user's loss
    penalty(module)                each step: a term on the whole model's weights, as `penalty=` of `Run`
    on_gradients(step, mean)       each step: gradients are summed and not yet clipped
    applied(step)                  each step that counts: what this worker updates is new, and nobody else sees it yet
    published(step)                each step that counts: every worker sees the new parameters
    Recipe.export(state)           the whole state dict as it is handed over, for `run.state_dict(weights="export")`

What a recipe does not override is never called. Steps count from 0. Recipes act in the order in which they are given.

State: tensors that belong to elements of parameters are `extras`, saved and cut anew as parameters are; plain numbers
are `state`. A recipe is EXACT if a run under any strategy that it composes with computes what one process computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shoal.checkpoint.layout.region import Region
from shoal.data.batch import Batch, Inputs
from shoal.data.feed import Feed
from shoal.exchange.contract import Exchange, ExtraState, LocalShard
from shoal.exchange.facts import Facts
from shoal.types import Plan, Promise
from shoal.world.mesh import Mesh
from shoal.world.world import World

REASONS = ("uses_servers", "updates_alone", "cuts_parameters", "compresses", "tensor", "pipeline")
"""What a recipe may refuse: facts of an exchange, and whether there is a compressor, tpN or ppN."""


@dataclass(frozen=True)
class Preparation:
    """What there is before the model is cut."""

    model: nn.Module
    """Whole, and the same on every worker."""
    together: World
    """All workers; this one alone where they meet at servers only."""
    seed: int
    inputs: Inputs
    """From a batch to what goes into the model."""
    batch: Callable[[list[object]], Batch]
    """From samples to a batch as the run has it: collated, on the device, in the run's number format."""
    sample_loss: Callable[[object, Batch], torch.Tensor]
    """The loss of a batch of one sample, as a sum; refuses a model that returns its own."""


@dataclass(frozen=True)
class RunView:
    """What a recipe sees of a run."""

    prepared: object
    """What `prepare` has returned."""
    name: str
    """Under which the recipe keeps its state: prune, or prune.2 for a second one."""
    model: nn.Module
    """As this worker runs it: whole, or with its part of each layer, or its stages only."""
    exchange: Exchange
    mesh: Mesh
    sizes: Mapping[str, torch.Size]
    """Every parameter of the whole model, in its order: the same on every worker."""
    learning: tuple[str, ...]
    """Those parameters of the whole model that learn, at some time."""
    region: Callable[[LocalShard], Region]
    """Where what is held of a parameter lies in the parameter itself."""
    first: Callable[[str], str]
    """The name under which the whole model knows a parameter of this worker."""
    same: Mapping[str, str]
    """Names of copies of a weight that another stage answers for."""
    cut: frozenset[str]
    """Parameters of which each worker of the tensor axis has a part."""
    seed: int
    inputs: Inputs
    clips: bool
    """Whether somebody looks at the norm of the gradient."""


class Running:
    """A recipe at work in one run; it acts where it overrides."""

    def before_step(self, step: int) -> None:
        """Parameters are fresh; the forward passes come next."""

    def on_loss(
        self, output: object, batch: Batch, total: torch.Tensor, count: float
    ) -> tuple[torch.Tensor, float]:
        """The sum of the loss over a micro-batch, with what this recipe adds to it; and its count."""
        del output, batch
        return total, count

    def penalty(self, module: nn.Module) -> torch.Tensor:
        """A scalar of the whole model's weights, added once a step to the mean loss."""
        raise NotImplementedError(f"{type(self).__name__} has no penalty on {type(module).__name__}")

    def on_gradients(self, step: int, mean: float) -> None:
        """Gradients are summed, and × `mean` they are the mean gradient: change them in `gradient_shards` of the
        exchange, or `withhold` some."""

    def applied(self, step: int) -> None:
        """What this worker updates (`optimizer_shards`) is new; change it in place before others see it."""

    def published(self, step: int) -> None:
        """Every worker sees the new parameters (`parameter_shards`), which must stay as they are."""

    def report(self) -> Mapping[str, float]:
        """Numbers for the step's report, the same on every worker. Not collective."""
        return {}

    def extras(self) -> list[ExtraState]:
        """State per element, as it lies on this worker: saved from these tensors, and filled into them."""
        return []

    def state(self) -> dict[str, object] | None:
        """Plain numbers and text to save; None: nothing."""
        return None

    def go_on(self, state: Mapping[str, object] | None) -> str:
        """After `extras` were filled from a checkpoint; None: it has nothing of this recipe, which begins anew.

        What is to be said of that; empty for nothing.
        """
        del state
        return ""


@dataclass(frozen=True)
class Recipe:
    """What the user asks for. Its fields are options; heirs are frozen dataclasses, one a file."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str]
    refuses: ClassVar[Mapping[str, str]] = {}
    """Of REASONS, what it cannot do exactly, and why: refused before anything starts."""
    adds_loss: ClassVar[bool] = False
    """True if what runs has `on_loss`."""
    adds_penalty: ClassVar[bool] = False
    """True if what runs has a `penalty`."""
    needs_values: ClassVar[bool] = False
    """True if `prepare` reads or makes values of parameters: then no worker defers making them."""

    def check(self, plan: Plan) -> str:
        """Why it cannot work with a plan for another reason than those in `refuses`; empty: it can."""
        del plan
        return ""

    def feed(self, feed: Feed) -> Feed:
        """What the loader is asked for, with other data or another order of it. Every worker does the same."""
        return feed

    def prepare(self, preparation: Preparation) -> object:
        """Change the whole model before it is cut. Every worker does the same. What `run` is to get of it."""
        del preparation
        return None

    def run(self, view: RunView) -> Running:
        """The recipe at work; by default it has nothing more to do. Every worker calls it."""
        del view
        return Running()

    def learning_rates(self, names: list[str]) -> Mapping[str, float]:
        """Factors on the learning rate, by the name of a parameter of the whole model; 1 where nothing is said."""
        del names
        return {}

    def export(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A whole state dict in the form in which it is handed over."""
        return state


def refusal(recipe: Recipe, name: str, plan: Plan, facts: type[Facts]) -> str:
    """Why a recipe cannot work with a plan, in a sentence; empty if it can."""
    given = {
        "uses_servers": facts.uses_servers,
        "updates_alone": facts.updates_alone and not facts.uses_servers,
        "cuts_parameters": facts.cuts_parameters,
        "compresses": plan.compressor is not None,
        "tensor": plan.tensor is not None,
        "pipeline": plan.pipeline is not None,
    }
    why = next((words for reason, words in recipe.refuses.items() if given[reason]), "") or recipe.check(plan)
    return f"recipes={name} under {plan}: {why}." if why else ""
