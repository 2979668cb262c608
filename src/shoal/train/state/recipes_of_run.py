"""The recipes of a run: refused where they cannot work, and what each of them sees of the run."""

from __future__ import annotations

from torch import nn

from shoal import recipe
from shoal.data.batch import ModelInputs
from shoal.errors import ConfigError
from shoal.recipe.averages import make_average
from shoal.recipe.contract import Preparation, RunView, refusal
from shoal.recipe.recipes import Recipes, named
from shoal.train.model.whole_model import Whole
from shoal.train.rules import facts_of
from shoal.train.run_config import RunConfig
from shoal.train.server_setup import uses_servers
from shoal.train.technique.clip import ByNorm, make_clip
from shoal.train.technique.loss import as_sum_and_count
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.world import World


def open_recipes(config: RunConfig, plan: Plan) -> Recipes:
    """What is asked for by `recipes=` and `ema=`; refuses what cannot work with the plan."""
    asked = recipe.make_recipes(config.recipes)
    for one in asked:
        said = refusal(one, recipe.name_of(one), plan, facts_of(plan))
        if said:
            raise ConfigError(said)
    average = make_average(config.ema)
    return Recipes(
        named([*asked, *([average] if average is not None else [])], recipe.name_of), as_sum_and_count
    )


def prepare_model(recipes: Recipes, config: RunConfig, plan: Plan, mesh: Mesh, model: nn.Module) -> None:
    """Let recipes change the whole model. Every rank calls it."""
    inputs = ModelInputs(model, config.inputs, config.loss is None)
    together = World.alone(mesh.world.device) if uses_servers(plan) else mesh.world
    recipes.prepare(Preparation(model, together, config.seed, inputs, config.loss))


def run_recipes(config: RunConfig, whole: Whole) -> Whole:
    """The exchange is there. Every rank calls it."""
    whole.recipes.run(
        RunView(
            name="",
            model=whole.exchange.module,
            exchange=whole.exchange,
            mesh=whole.mesh,
            sizes={name: whole.shape.sizes[name] for name in whole.shape.parameters},
            learning=whole.recipes.learning,
            region=whole.region,
            first=whole.first,
            same=whole.same,
            cut=frozenset(whole.layout.pieces),
            seed=config.seed,
            inputs=ModelInputs(whole.exchange.module, config.inputs, config.loss is None),
            clips=isinstance(make_clip(config.clip), ByNorm),
        )
    )
    return whole
