"""Slot: what a run trains for, beside its loss. One file a choice; this table is the list of them."""

from __future__ import annotations

from shoal.config import fill_options, parse_choices
from shoal.errors import ConfigError
from shoal.recipe.averages import Ema, Swa
from shoal.recipe.contract import Recipe
from shoal.recipe.ewc import Ewc
from shoal.recipe.freeze import Freeze
from shoal.recipe.grow.replay import Replay
from shoal.recipe.lora import Lora
from shoal.recipe.prune import Prune
from shoal.recipe.quantise.qat import Qat
from shoal.recipe.rates import LayerDecay, Rate
from shoal.recipe.start import Start
from shoal.recipe.teacher.distil import Distil
from shoal.recipe.teacher.lwf import Lwf
from shoal.table import Table
from shoal.types import Choice

TABLE: Table[type[Recipe]] = Table(
    "recipe",
    {
        "start": Start,
        "lora": Lora,
        "ewc": Ewc,
        "prune": Prune,
        "freeze": Freeze,
        "rate": Rate,
        "layer_decay": LayerDecay,
        "distil": Distil,
        "lwf": Lwf,
        "qat": Qat,
        "replay": Replay,
        "ema": Ema,
        "swa": Swa,
    },
)


def make_recipes(given: object) -> list[Recipe]:
    """From text such as "prune(0.8) & ema(0.999)", a recipe, or a list of both, to recipes in their order.

    >>> make_recipes("freeze(encoder.0) & ema(0.9)")
    [Freeze(names='encoder.0', until=0), Ema(decay=0.9, every=1, warmup=False)]
    >>> make_recipes([Ema(0.9)]), make_recipes("")
    ([Ema(decay=0.9, every=1, warmup=False)], [])
    """
    if isinstance(given, Recipe):
        return [given]
    if isinstance(given, str):
        return [make_recipe(choice) for choice in parse_choices(given, "recipes")] if given.strip() else []
    if isinstance(given, list | tuple):
        return [recipe for one in given for recipe in make_recipes(one)]
    raise ConfigError(
        f"recipes= is a {type(given).__name__}; give text such as 'prune(0.8, begin=100, end=900) & ema(0.999)', a "
        "recipe, or a list of them."
    )


def make_recipe(choice: Choice) -> Recipe:
    """One recipe from a parsed choice."""
    return fill_options(choice, TABLE.look_up(choice.name))


def name_of(recipe: Recipe) -> str:
    """The name under which a recipe is listed, or that of its class."""
    found = next((name for name, kind in TABLE.items() if kind is type(recipe)), "")
    return found or type(recipe).__name__.lower()
