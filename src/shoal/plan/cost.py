"""What a strategy costs a worker: the costs of its choices, added up."""

from __future__ import annotations

from shoal import exchange, pipeline
from shoal.config import fill_options
from shoal.cost import Cost, ModelProfile
from shoal.plan.check import compressor_of, pipeline_options
from shoal.tensor import tensor_cost
from shoal.types import Plan
from shoal.world.mesh import Mesh
from shoal.world.traffic import ring_bytes

_TALLY = 2 * 8
"""Bytes of a loss and a count."""


def plan_cost(plan: Plan, profile: ModelProfile, mesh: Mesh) -> Cost:
    """Bytes that the worker at this place of the mesh holds and sends in a steady step.

    >>> import torch
    >>> from shoal.config import parse_strategy
    >>> from shoal.cost import ParameterProfile
    >>> from shoal.world.world import World
    >>> profile = ModelProfile((ParameterProfile("weight", (1000, 1000)),))
    >>> for text in ("ddp", "zero1", "ddp + int8"):
    ...     cost = plan_cost(parse_strategy(text), profile, Mesh.imagine(World.alone(), workers=4))
    ...     print(text, cost.resident["gradients"], cost.wire)
    ddp 4000768 {'data': 6001188}
    zero1 4000768 {'data': 6001188}
    ddp + int8 4000768 {'data': 3047508}
    """
    chosen = exchange.TABLE.look_up(plan.exchange.name)
    options: object = fill_options(plan.exchange, chosen.Options)
    found = chosen.cost(options, profile, mesh, compressor_of(plan)) + tensor_cost(profile, mesh.tensor.size)
    if profile.stages is None:
        return found
    ranks = mesh.stages.size
    schedule = pipeline.TABLE.look_up(pipeline_options(plan).schedule)
    told = ring_bytes(ranks * _TALLY, ranks)
    for tie in profile.stages.tied:  # and one number that tells whether any stage had a gradient
        told += ring_bytes((chosen.elements_held(options, tie, mesh) + 1) * tie.dtype.itemsize, ranks)
    return found + schedule.cost(mesh.stages.rank, ranks, profile.stages) + Cost(wire={"stage": told})
