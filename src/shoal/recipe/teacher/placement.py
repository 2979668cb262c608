"""A teacher in parts: each worker holds a share of every block, and all gather a block when it runs.

Nothing learns, so there is nothing to reduce: a block's parameters are there from just before its forward pass to just
after. A worker holds 1/N of the teacher, and one block of it for a moment.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from shoal.blocks import find_blocks
from shoal.world.world import World


class TeacherUnit:
    """The parameters of one block, in parts."""

    def __init__(self, parameters: list[nn.Parameter], world: World) -> None:
        self._parameters = parameters
        self._shapes = [parameter.shape for parameter in parameters]
        self._world = world
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        share = -(-flat.numel() // world.size)
        padded = torch.zeros(share * world.size, dtype=flat.dtype, device=flat.device)
        padded[: flat.numel()] = flat
        self.part = padded[world.rank * share : (world.rank + 1) * share].clone()
        self.release()

    def gather(self, *_: object) -> None:
        """All parts are here. Every worker calls it."""
        whole = self.part.new_empty(self.part.numel() * self._world.size)
        self._world.all_gather(whole, self.part).wait()
        at = 0
        for parameter, shape in zip(self._parameters, self._shapes, strict=True):
            parameter.data = whole[at : at + shape.numel()].view(shape)
            at += shape.numel()

    def release(self, *_: object) -> None:
        """Only this worker's part stays."""
        for parameter in self._parameters:
            parameter.data = self.part.new_empty(0)


def shard(teacher: nn.Module, world: World) -> list[TeacherUnit]:
    """Leave this worker its part of a teacher. Every worker calls it, with the same one."""
    units = []
    seen: set[nn.Parameter] = set()
    for name in (*find_blocks(teacher), ""):
        module = teacher.get_submodule(name)
        own = [p for p in module.parameters() if p not in seen]
        seen.update(own)
        for dtype in {p.dtype: None for p in own}:
            unit = TeacherUnit([p for p in own if p.dtype is dtype], world)
            module.register_forward_pre_hook(partial(_before, unit))
            module.register_forward_hook(partial(_after, unit))
            units.append(unit)
    return units


def _before(unit: TeacherUnit, module: nn.Module, inputs: object) -> None:
    del module, inputs
    unit.gather()


def _after(unit: TeacherUnit, module: nn.Module, inputs: object, output: object) -> None:
    del module, inputs, output
    unit.release()


def nbytes(teacher: nn.Module) -> int:
    """What its parameters take whole."""
    return sum(p.numel() * p.element_size() for p in teacher.parameters())
