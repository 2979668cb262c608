"""A model in units: the modules whose parameters torch's FSDP2 gathers, and whose gradients it reduces, together.

This file and its neighbours `rows`, `gathers` and `scatters` are the only ones that know the inside of FSDP2.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shoal.cost import ParameterProfile
from shoal.errors import ConfigError
from shoal.exchange.setup import Setup
from shoal.torch_private import (
    FsdpGroup,
    FsdpParameter,
    fsdp_abandon,
    fsdp_groups,
    fsdp_has_gathered,
    parameters_of,
)
from shoal.world.world import World

GATHER = {"same": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class UnitOptions:
    """Options of zero3."""

    reshard: bool = True
    """Let go of gathered parameters after forward and gather them again for backward; false: keep them."""
    replicas: int = 1
    """Cut within so many equal groups of workers; each group holds everything once."""
    offload: bool = False
    """Keep what is cut in host memory, and update it there."""
    gather: str = "same"
    """The type in which parameters travel and the model computes; 'bf16' is half the traffic, and not exact."""

    def __post_init__(self) -> None:
        if self.gather not in GATHER:
            raise ConfigError(f"zero3: gather='{self.gather}'; it is 'same' or 'bf16'.")


@dataclass(frozen=True)
class Unit:
    """A module that FSDP2 manages, with the parameters in it that no inner unit has."""

    name: str
    module: FSDPModule

    @property
    def groups(self) -> Sequence[FsdpGroup]:
        """FSDP2's record of the parameters: one, or none if inner units have all of them."""
        return fsdp_groups(self.module)

    @property
    def cells(self) -> list[FsdpParameter]:
        return [cell for group in self.groups for cell in group.fsdp_params]

    @property
    def learns(self) -> bool:
        return any(cell.sharded_param.requires_grad for cell in self.cells)

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    def abandon(self) -> None:
        """Back to rows from wherever a pass was cut short: FSDP2 only gets there by the end of a backward pass."""
        fsdp_abandon(self.module)
        self.reshard()


class OwnParameters:
    """The parameters that FSDP2 gathers when a unit is called, even if a caller has put others in their places."""

    def __init__(self, unit: Unit) -> None:
        assert isinstance(unit.module, nn.Module)
        self._name = unit.name
        cells = {id(cell.sharded_param): cell for cell in unit.cells}
        self._places = [
            (parameters_of(module), key, cells[id(parameter)])
            for module in unit.module.modules()
            for key, parameter in parameters_of(module).items()
            if id(parameter) in cells
        ]

    def check(self) -> None:
        """Refuse a call with parameters that are not the unit's own."""
        for parameters, key, cell in self._places:
            here = parameters.get(key)
            if here is not cell.sharded_param and not (
                fsdp_has_gathered(cell) and here is cell.unsharded_param
            ):
                raise ConfigError(
                    f"zero3: layer '{self._name}' is called with another '{key}' than its own, as "
                    "torch.func.functional_call does, and zero3 would compute with its own all the same; use zero2 or "
                    "ddp, or parametrize the layer."
                )


def cut_into_units(root: nn.Module, setup: Setup, options: UnitOptions) -> list[Unit]:
    """Cut every parameter over the mesh, block by block, and what is left as the unit of the root, which is last."""
    assert setup.mesh is not None
    model, mesh = setup.model, setup.mesh["shard"]
    device = mesh.device_type
    # A block without parameters would be a unit without collectives, and only cost hooks.
    names = [name for name in setup.blocks if any(True for _ in model.get_submodule(name).parameters())]
    # torch warns of any block that returns a view, lest it be changed in place, for then it is not gathered again for
    # its backward pass. Gradients are reduced all the same: a backward pass that needs none of its values is right, and
    # one that does finds an empty storage, which FirstPass tells in a sentence. So the user need not be told before.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    unable = _not_to_be_cut(root, [model.get_submodule(name) for name in names])
    policy = CPUOffloadPolicy(pin_memory=device != "cpu") if options.offload else OffloadPolicy()

    def cut(name: str, module: nn.Module, after_forward: bool | None) -> Unit:
        made = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=after_forward,
            mp_policy=_precision(module, GATHER[options.gather], unable, outermost=module is root),
            offload_policy=policy,
            ignored_params=unable,
        )
        made.set_gradient_divide_factor(1.0)  # gradients are sums, …
        made.set_force_sum_reduction_for_comms(True)  # … taken by no other operation than a sum
        made.set_reduce_scatter_unused_params(True, recurse=False)
        made.set_modules_to_backward_prefetch([made])  # none, that is: Gathers fetches ahead
        return Unit(name, made)

    inner = [cut(name, model.get_submodule(name), options.reshard) for name in names]
    # What the root holds is needed from the first operation to the last: it stays gathered in between.
    return [*inner, cut("", root, None if options.reshard else False)]


def make_real(root: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device memory: for whole tensors where they are whole, for rows where they are cut."""
    tied: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    root.to_empty(device=device)
    for first, *others in tied.values():  # torch has made each of them a tensor of its own
        # Tied weights have to be one tensor again, or the optimizer would update two.
        shared = root.get_parameter(first)
        for name in others:
            owner, _, key = name.rpartition(".")
            parameters_of(root.get_submodule(owner))[key] = shared


def _precision(
    module: nn.Module, gather: torch.dtype | None, unable: Collection[nn.Parameter], outermost: bool
) -> MixedPrecisionPolicy:
    kinds = [p.dtype for p in module.parameters() if p.requires_grad and p not in unable]
    if gather is None or not kinds:
        return MixedPrecisionPolicy()
    # Gradients are summed in the type that the optimizer works in, whatever the parameters travelled in.
    return MixedPrecisionPolicy(
        param_dtype=gather, reduce_dtype=kinds[0], output_dtype=kinds[0] if outermost else None
    )


def _not_to_be_cut(root: nn.Module, inner: list[nn.Module]) -> set[nn.Parameter]:
    """Parameters that FSDP2 cannot take: single numbers, strange strides, other types than the rest of their unit."""
    within = {p for module in inner for p in module.parameters()}
    outside = [p for p in root.parameters() if p not in within]
    return {p for group in (*(list(m.parameters()) for m in inner), outside) for p in _unable(group)}


def _unable(group: list[nn.Parameter]) -> Iterator[nn.Parameter]:
    profiles = [
        ParameterProfile("", tuple(p.shape), p.dtype, p.requires_grad, contiguous=p.is_contiguous())
        for p in group
    ]
    for p, able in zip(group, can_be_cut(profiles), strict=True):
        if not able:
            yield p


def can_be_cut(unit: Sequence[ParameterProfile]) -> list[bool]:
    """Which parameters of a unit FSDP2 can take."""
    kinds = Counter[torch.dtype]()
    for p in unit:
        if p.trained:
            kinds[p.dtype] += p.numel
    # FSDP2 gathers a unit in one collective, so what learns in it has to be of one type.
    usual = kinds.most_common(1)[0][0] if kinds else None
    return [
        bool(p.shape) and p.numel > 0 and p.contiguous and (not p.trained or p.dtype == usual) for p in unit
    ]


def axes_of(setup: Setup) -> tuple[World, World]:
    """The workers of the data axis among whom everything is cut, and those who hold what this one holds."""
    alone = World.alone(setup.world.device)
    if setup.mesh is None:
        return alone, alone
    if "replica" not in (setup.mesh.mesh_dim_names or ()):
        return setup.world, alone
    shard, replica = setup.mesh["shard"], setup.mesh["replica"]
    owners = setup.world.within(shard.get_group()) if shard.size() > 1 else alone
    return owners, setup.world.within(replica.get_group())
