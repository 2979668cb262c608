"""What is different where workers meet at servers, and run no collective among them."""

from __future__ import annotations

import torch

from shoal import exchange
from shoal.config import fill_options, parse_strategy
from shoal.embedding import SparseEmbedding
from shoal.exchange.buckets.backward_order import ForwardOrder
from shoal.exchange.contract import trainable
from shoal.exchange.ps_worker.options import PsOptions
from shoal.plan.automatic import NAME
from shoal.train.model.divide import Trial, is_differentiating
from shoal.train.model.make import in_evaluation
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.world import World


def uses_servers(plan: Plan) -> bool:
    """Whether workers meet at servers."""
    return exchange.TABLE.look_up(plan.exchange.name).uses_servers


def meets_at_servers(strategy: str) -> bool:
    """Whether workers under a strategy meet at servers only, and not within their host either."""
    plan = parse_strategy(strategy)
    if plan.exchange.name == NAME or not uses_servers(plan):
        return False
    options: object = fill_options(plan.exchange, exchange.TABLE.look_up(plan.exchange.name).Options)
    return not isinstance(options, PsOptions) or options.tier == "worker"


def sharers(plan: Plan, mesh: Mesh) -> World:
    """Those who divide a step's samples among them."""
    return mesh.world if uses_servers(plan) else mesh.data


def order_of_use(trial: Trial) -> list[str]:
    """Parameters by one trial pass, the last used first: where they lie must be known before the first step.

    Rows of an embedding are on servers that are not there yet; then the order of definition has to do.
    """
    model = trial.model
    if any(isinstance(module, SparseEmbedding) for module in model.modules()):
        return []
    watch = ForwardOrder(model, trainable(model))
    try:
        with in_evaluation(model), torch.no_grad(), trial.precision.context(trial.device):
            trial.run()
    except RuntimeError as error:
        if not is_differentiating(error):
            raise
        return []  # its forward differentiates: the order of definition has to do
    finally:
        seen = watch.close()
    return seen
