"""The penalty on weights that no worker has whole: under zero3, tpN and ppN.

A penalty may be any function of the model. So the whole model comes together on every worker once a step, the penalty
and its gradient are computed there, and each worker adds to the summed gradients what belongs to its own parts. Nobody
else sends anything. It costs the memory of a whole model and of its gradient, for as long as that takes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.exchange.contract import Stepper
from shoal.tensor import cut
from shoal.torch_private import buffers_of, parameters_of
from shoal.train.model.whole_model import Whole
from shoal.train.technique.penalty import Penalty, penalty_of


class Outline:
    """The modules of a model without memory, taken down before it is cut: whole tensors can be put into it.

    >>> model = nn.Sequential(nn.Linear(2, 1, bias=False))
    >>> outline = Outline(model)
    >>> with outline.filled({"0.weight": torch.ones(1, 2)}, {}) as whole:
    ...     float(whole[0].weight.sum())
    2.0
    """

    def __init__(self, model: nn.Module) -> None:
        memo: dict[int, object] = {id(b): b for b in model.buffers()}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        try:
            self._module = copy.deepcopy(model, memo)
        except Exception as error:
            raise ConfigError(
                f"penalty= needs a copy of the modules where workers hold parts of the model, and "
                f"{type(model).__name__} cannot be copied ({error}); use ddp, zero1, zero2 or shared."
            ) from None
        self._learning = {name: p.requires_grad for name, p in self._module.named_parameters()}
        first = {id(p): name for name, p in self._module.named_parameters()}
        self._slots = [
            (parameters_of(module), key, first[id(p)])
            for module in self._module.modules()
            for key, p in parameters_of(module).items()
            if p is not None
        ]
        self._empty = [table[key] for table, key, _ in self._slots]

    @contextmanager
    def filled(
        self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> Iterator[nn.Module]:
        """The model with these values, while it lasts."""
        made = {name: nn.Parameter(value, self._learning[name]) for name, value in parameters.items()}
        for table, key, name in self._slots:
            table[key] = made[name]
        for prefix, module in self._module.named_modules():
            for key in buffers_of(module):
                found = buffers.get(f"{prefix}.{key}" if prefix else key)
                if found is not None:
                    buffers_of(module)[key] = found
        try:
            yield self._module
        finally:  # let go of the memory
            for (table, key, _), nothing in zip(self._slots, self._empty, strict=True):
                table[key] = nothing


def add_gathered(given: Penalty, outline: Outline, whole: Whole, exchange: Stepper, weight: float) -> float:
    """Add the gradient of the penalty × `weight` to the summed gradients; returns the penalty. Collective."""
    world = whole.mesh.world
    values = {name: t.to(world.device) for name, t in whole.tensors().items()}
    parameters = {name: values.pop(name) for name in whole.shape.parameters}
    # Buffers that no state dict holds are where the model is.
    buffers = {**dict(whole.exchange.module.named_buffers()), **values}
    with outline.filled(parameters, buffers) as module, torch.enable_grad():
        value = penalty_of(given, module)
        learning = {name: p for name, p in module.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(value, list(learning.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(learning, found, strict=True) if g is not None}
    # Nobody goes on to update what others are still reading, and all report the same float. Replicas that train apart
    # share nothing, and need not all be here.
    others = whole.mesh.model if whole.exchange.work.loss_is_local else world
    told = float(others.gather_numbers([float(value.detach())])[0, 0])
    exchange.add_gradients(_parts(whole, gradients), weight)
    return told


def _parts(whole: Whole, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is this worker's of whole gradients, by the names that its part of the model has."""
    layout, rank = whole.layout, whole.mesh.tensor.rank
    mine = [name for name, p in whole.exchange.module.named_parameters() if p.requires_grad]
    named = {name: gradients.get(whole.first(name)) for name in mine}
    return {name: cut(name, g, layout, rank) for name, g in named.items() if g is not None}
