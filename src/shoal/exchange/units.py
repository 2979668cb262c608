"""A model in units: the modules whose parameters torch's FSDP2 gathers, and whose gradients it reduces, together.

This file and its neighbours `rows`, `gathers` and `scatters` are the only ones that know the inside of FSDP2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shoal.errors import ConfigError
from shoal.exchange.setup import Setup
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
    def groups(self) -> list[Any]:
        """FSDP2's record of the parameters: one, or none if inner units have all of them."""
        found: list[Any] = self.module._get_fsdp_state()._fsdp_param_groups
        return found

    @property
    def cells(self) -> list[Any]:
        return [cell for group in self.groups for cell in group.fsdp_params]

    @property
    def learns(self) -> bool:
        return any(cell.sharded_param.requires_grad for cell in self.cells)

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()


def cut_into_units(root: nn.Module, setup: Setup, options: UnitOptions) -> list[Unit]:
    """Cut every parameter over the mesh, block by block, and what is left as the unit of the root, which is last."""
    assert setup.mesh is not None
    model, mesh = setup.model, setup.mesh["shard"]
    device = mesh.device_type
    names = [name for name in setup.blocks if any(True for _ in model.get_submodule(name).parameters())]
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
        shared = root.get_parameter(first)
        for name in others:
            owner, _, key = name.rpartition(".")
            root.get_submodule(owner)._parameters[key] = shared


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
    kinds = Counter[torch.dtype]()
    for p in group:
        if p.requires_grad:
            kinds[p.dtype] += p.numel()
    usual = kinds.most_common(1)[0][0] if kinds else None
    for p in group:
        if p.dim() == 0 or p.numel() == 0 or not p.is_contiguous() or (p.requires_grad and p.dtype != usual):
            yield p


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
