"""From a model to its profile, from which costs follow: what a worker will hold of it, and what it will pass on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from shoal.blocks import find_blocks
from shoal.cost import CutProfile, ModelProfile, ParameterProfile, StageProfile
from shoal.optimizer import MakeOptimizer, state_bytes
from shoal.pipeline.base import Schedule
from shoal.pipeline.split import Split
from shoal.tensor import TensorLayout, TensorOptions, profile_pass
from shoal.train.model.divide import Division, Trial
from shoal.world.mesh import Mesh


def profile_model(
    model: nn.Module, make_optimizer: MakeOptimizer, order: Collection[str] = ()
) -> ModelProfile:
    """The profile of a whole model; a model on the meta device will do.

    `order`: parameters in the order in which their gradients become ready; the last of the model first, if not given.

    >>> profile = profile_model(nn.Linear(3, 2), lambda params: torch.optim.SGD(params, lr=0.1))
    >>> [(p.name, p.shape) for p in profile.parameters]
    [('bias', (2,)), ('weight', (2, 3))]
    """
    named = dict(model.named_parameters())
    state = state_bytes(make_optimizer, named)
    blocks = [f"{name}." for name in find_blocks(model)]
    found = {
        name: ParameterProfile(
            name,
            tuple(p.shape),
            p.dtype,
            p.requires_grad,
            state[name],
            next((block[:-1] for block in blocks if name.startswith(block)), ""),
            contiguous=p.is_contiguous(),
        )
        for name, p in named.items()
    }
    ranked = [name for name in order if name in found]
    others = [name for name in reversed(named) if name not in set(ranked)]
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return ModelProfile(tuple(found[name] for name in (*ranked, *others)), buffers)


def profile_part(
    whole: ModelProfile,
    division: Division,
    mesh: Mesh,
    schedule: type[Schedule],
    microbatches: int,
    size: int,
) -> ModelProfile:
    """The profile of one worker's part of a model that is divided; `size`: samples in a full micro-batch."""
    layout = TensorLayout({}, 1) if division.cuts is None else division.cuts.layout()
    parameters = [_cut(p, layout, mesh.tensor.rank) for p in whole.parameters]
    if division.split is None:
        return replace(whole, parameters=tuple(parameters))
    split = division.split
    mine = [n for n in range(len(split.stages)) if schedule.rank_of(n, mesh.stages.size) == mesh.stages.rank]
    copies = _copies(split, mine)
    names = {name for number in mine for name in split.stages[number].parameters}
    first = {p.name: p for p in parameters}
    aliases = {name: group[0][1] for group in split.tied for _, name in group}
    held = [p for p in parameters if p.name in names]
    for name in sorted(names - first.keys()):  # a weight that an earlier stage has under its first name
        if name in aliases and aliases[name] not in names:
            held.append(replace(first[aliases[name]], name=name))
    held = [replace(p, share=0.0) if p.name in copies else p for p in held]
    passed = tuple(size * torch.Size(shape).numel() * dtype.itemsize for shape, dtype in split.activations)
    tied = tuple(first[group[0][1]] for group in split.tied)
    return replace(whole, parameters=tuple(held), stages=StageProfile(microbatches, passed, tied))


def profile_cuts(
    trial: Trial, division: Division, mesh: Mesh, options: TensorOptions, schedule: type[Schedule]
) -> CutProfile:
    """The data that tensor ranks sum and gather in one micro-batch: from one pass of the whole model."""
    cuts, split = division.cuts, division.split
    if cuts is None:
        return CutProfile()
    if split is not None:
        mine = [s for s in split.stages if schedule.rank_of(s.number, mesh.stages.size) == mesh.stages.rank]
        running = {name for stage in mine for name in stage.modules}
        cuts = replace(cuts, cuts=tuple(one for one in cuts.cuts if one.module in running))
    with trial.calm(), torch.enable_grad():
        return profile_pass(trial.model, trial.run, cuts, options)


def _cut(parameter: ParameterProfile, layout: TensorLayout, rank: int) -> ParameterProfile:
    shape, share = list(parameter.shape), layout.shares(parameter.name)
    if parameter.name in layout.pieces:
        piece = layout.pieces[parameter.name]
        shape[piece.dim] = piece.local(layout.degree, rank)
    return replace(parameter, shape=tuple(shape), share=share)


def _copies(split: Split, mine: Collection[int]) -> set[str]:
    """Names of weights that an earlier stage, of another worker, holds too and counts."""
    later = [group for group in split.tied if group[0][0] not in mine]
    return {name for group in later for number, name in group[1:] if number in mine}
