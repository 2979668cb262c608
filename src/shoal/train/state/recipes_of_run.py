"""The recipes of a run: refused where they cannot work, and what each of them sees of the run."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import default_collate

from shoal import recipe
from shoal.data.batch import Batch, ModelInputs, convert
from shoal.errors import ConfigError
from shoal.recipe.averages import make_average
from shoal.recipe.contract import Preparation, RunView, refusal
from shoal.recipe.recipes import Recipes, named
from shoal.train.model.whole_model import Whole
from shoal.train.rules import facts_of
from shoal.train.run_config import RunConfig
from shoal.train.server_setup import uses_servers
from shoal.train.technique import precision
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
    dtype = precision.TABLE.look_up(config.precision).model

    def batch(samples: list[object]) -> Batch:
        return convert((config.collate or default_collate)(samples), mesh.world.device, dtype)

    def sample_loss(output: object, batch: Batch) -> torch.Tensor:
        if config.loss is None:
            raise ConfigError(
                "a model that returns its own loss tells none of single samples, and a recipe needs that; give loss=."
            )
        return as_sum_and_count(config.loss(output, batch), batch)[0]

    recipes.prepare(Preparation(model, together, config.seed, inputs, batch, sample_loss))


def run_recipes(config: RunConfig, whole: Whole) -> Whole:
    """The exchange is there. Every rank calls it."""
    whole.recipes.run(
        RunView(
            prepared=None,
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
