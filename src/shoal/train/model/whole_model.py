"""The whole model by name, whoever holds its parts: what checkpoints, `verify` and `run.state_dict` see.

An exchange joins what it has cut over the data axis; here, the parts of layers are joined over the tensor axis, and
stages put together. A weight that several stages hold is one weight, under its first name. Every rank takes part in
gathering, and every rank gets the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.checkpoint.layout.region import Region
from shoal.exchange.contract import Exchange, ExtraState, LocalShard, State
from shoal.recipe.recipes import Recipes
from shoal.tensor.layout import TensorLayout, join
from shoal.world.mesh import Mesh
from shoal.world.world import World

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelShape:
    """What the model is, whole: taken down before anything is cut."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    """Those that a state dict holds."""
    sizes: Mapping[str, torch.Size]
    others: Mapping[str, str]
    """Other names in a state dict of a tensor that is listed under its first."""

    @staticmethod
    def of(model: torch.nn.Module) -> ModelShape:
        parameters = dict(model.named_parameters())
        stored = model.state_dict(keep_vars=True)
        buffers = {name: b for name, b in model.named_buffers() if name in stored}
        named = {**parameters, **buffers}
        first = {id(tensor): name for name, tensor in named.items()}
        others = {n: first[id(t)] for n, t in stored.items() if n not in named and id(t) in first}
        return ModelShape(tuple(parameters), tuple(buffers), {n: t.shape for n, t in named.items()}, others)


@dataclass(frozen=True)
class Whole:
    """From parts to the whole and back."""

    mesh: Mesh
    exchange: Exchange
    shape: ModelShape
    layout: TensorLayout
    same: Mapping[str, str]
    """Names of this stage's copies of a weight or buffer that another stage answers for -> its first name."""
    recipes: Recipes
    """What the run trains for beside its loss, and the state of that."""

    def tensors(self) -> Tensors:
        """Every parameter and stored buffer."""
        mine = self._join(self.exchange.parameters())
        plain = torch.contiguous_format
        mine.update({name: b.detach().clone(memory_format=plain) for name, b in self.buffers().items()})
        whole = self._over_stages(mine)
        return {name: whole[name].cpu() for name in self.shape.sizes}

    def state_dict(self) -> Tensors:
        """The same as the model's own `state_dict` would have it: a tensor with several names under each of them."""
        found = self.tensors()
        return {**found, **{name: found[first] for name, first in self.shape.others.items()}}

    def parameters(self) -> Tensors:
        """Every parameter."""
        return {name: t for name, t in self.tensors().items() if name in self.shape.parameters}

    def gradients(self) -> Tensors:
        """Summed gradients; between the exchange's finish and update."""
        whole = self._over_stages(self._join(self.exchange.gradients()))
        return {name: whole[name] for name in self.shape.parameters if name in whole}

    def optimizer_state(self) -> State:
        """The state of every parameter."""
        state = self.exchange.optimizer_state()
        if self.mesh.model.size == 1:
            return state
        flat = {}
        for name, entries in state.items():
            for key, value in entries.items():
                joined = self._join({name: value})[name] if self._alike(name, value) else value
                flat[f"{key}/{name}"] = joined
        whole: State = {}
        for path, value in self._over_stages(flat).items():
            key, name = path.split("/", 1)
            whole.setdefault(name, {})[key] = value
        return {name: whole[name] for name in self.shape.parameters if name in whole}

    def buffers(self) -> Tensors:
        """Those of this worker's part of the model that a state dict holds."""
        return {name: b for name, b in self.exchange.module.named_buffers() if name in self.shape.buffers}

    def extras(self, saving: bool) -> list[ExtraState]:
        """What is saved besides parameters, buffers and the optimizer's state."""
        return [*self.exchange.extras(saving), *self.recipes.extras()]

    def region(self, held: LocalShard) -> Region:
        """Where what is held of a parameter lies in the parameter itself."""
        shape = tuple(self.shape.sizes[self.first(held.name)])
        stop = held.start + held.tensor.numel()
        piece = self.layout.pieces.get(held.name)
        if piece is None:
            return Region(shape, 0, ((0, shape[0]),) if shape else (), held.start, stop)
        spans = tuple(piece.spans(self.layout.degree, self.mesh.tensor.rank))
        return Region(shape, piece.dim, spans, held.start, stop)

    def first(self, name: str) -> str:
        """The name under which the whole model knows a parameter."""
        return self.same.get(name, name)

    def _alike(self, name: str, value: torch.Tensor) -> bool:
        """Whether an entry of a cut parameter's state has a number for each of its elements here."""
        piece = self.layout.pieces.get(name)
        if piece is None:
            return False
        shape = list(self.shape.sizes[self.first(name)])
        shape[piece.dim] = piece.local(self.layout.degree, self.mesh.tensor.rank)
        return list(value.shape) == shape

    def _join(self, parts: Mapping[str, torch.Tensor]) -> Tensors:
        group = self.mesh.tensor.group
        return {name: join(name, part, self.layout, group) for name, part in parts.items()}

    def _over_stages(self, mine: Mapping[str, torch.Tensor]) -> Tensors:
        kept = {name: t for name, t in mine.items() if name.rpartition("/")[2] not in self.same}
        return spread(self.mesh.stages, kept)


def spread(world: World, mine: Mapping[str, torch.Tensor]) -> Tensors:
    """What all of `world` hold, by name, on each of them. Collective."""
    if world.size == 1:
        return dict(mine)
    listed = world.gather_values([[name, list(t.shape), str(t.dtype)[6:]] for name, t in mine.items()])
    found: Tensors = {}
    for source, entries in enumerate(listed):
        for name, shape, dtype in entries:
            here = source == world.rank
            value = (
                mine[name].contiguous()
                if here
                else torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
            )
            if value.numel():
                world.broadcast(value, source).wait()
            found[name] = value
    return found
