"""The workers as a mesh: which replica of the model a worker belongs to, which stage of it, which part of a layer.

Ranks count through the tensor axis first, then through the stages, then through the replicas, so that those who
talk most sit next to each other: `ddp * tp2 * pp2` on eight workers is

    rank      0  1  2  3  4  5  6  7
    data      0  0  0  0  1  1  1  1
    stage     0  0  1  1  0  0  1  1
    tensor    0  1  0  1  0  1  0  1

Each axis is a World of its own: the workers that differ from this one along that axis only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.torch_private import flatten
from shoal.world.world import World

AXES = ("replica", "shard", "stage", "tensor")


@dataclass(frozen=True)
class Mesh:
    """This worker's place, axis by axis."""

    world: World
    """All workers of the job."""
    data: World
    """Data-parallel group: workers with the same model shard and different samples."""
    stages: World
    """Pipeline group: workers with the other stages, for the same samples and the same part of each layer."""
    tensor: World
    """Tensor-parallel group: workers with the other parts of this worker's layers."""
    model: World
    """Model-parallel group: workers that hold one model between them, all stages and parts, for the same samples."""
    joined: World | None = None
    """All workers with their group, where `world` itself has none (workers meet at servers)."""
    torch: DeviceMesh | None = None
    """These groups as torch's DeviceMesh: axis "shard", and those of AXES with several workers. None where workers
    differ in their samples only."""

    @staticmethod
    def open(world: World, tensor: int = 1, stages: int = 1, replicas: int = 0) -> Mesh:
        """Arrange the workers. `replicas` > 0 cuts the data axis into so many replicas × shards.

        >>> mesh = Mesh.open(World.alone())
        >>> mesh.data.size, mesh.model.size, mesh.torch
        (1, 1, None)
        """
        alone = World.alone(world.device)
        cells = tensor * stages
        if world.size == 1 or (cells == 1 and not replicas):
            return Mesh(world, world, alone, alone, alone)
        data = world.size // cells
        # Tensor innermost: its ranks talk most, and neighbours are on one host. Data outermost, since it talks once a
        # step.
        shape = (max(replicas, 1), data // max(replicas, 1), stages, tensor)
        mesh = world.meshes.get(shape)
        if mesh is None:  # groups are dear, and no run changes them
            kept = {name: size for name, size in zip(AXES, shape, strict=True) if size > 1 or name == "shard"}
            mesh = init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
            world.meshes[shape] = mesh
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))

        def axis(*axes: str) -> World:
            names = tuple(name for name in axes if sizes.get(name, 1) > 1)
            size = math.prod(sizes[name] for name in names)
            if size == 1:
                return alone
            if size == world.size:
                return world
            part = mesh[names]
            whole = part if len(names) == 1 else flatten(part, "_".join(names))
            return world.within(whole.get_group())

        return Mesh(
            world,
            axis("replica", "shard"),
            axis("stage"),
            axis("tensor"),
            axis("stage", "tensor"),
            torch=mesh,
        )

    @staticmethod
    def ungrouped(world: World) -> Mesh:
        """A worker that meets others at servers only: it has its number, and whatever it holds, it holds alone."""
        alone = World.alone(world.device)
        # What is sent to servers counts in one place.
        alone.traffic = world.traffic
        return Mesh(
            world.alone_among(), alone, alone, alone, alone, world if world.group is not None else None
        )

    @staticmethod
    def imagine(
        alone: World,
        workers: int,
        tensor: int = 1,
        stages: int = 1,
        rank: int = 0,
        hosts: Sequence[str] = (),
    ) -> Mesh:
        """What one of so many workers would see, with nobody there: only sizes and places are of use.

        >>> Mesh.imagine(World.alone(), 8, tensor=2).data.size
        4
        >>> Mesh.imagine(World.alone(), 4, stages=2, rank=3).stages.rank
        1
        """
        names = hosts or [""] * workers
        cells = tensor * stages
        ranks = range(workers)

        def axis(members: Sequence[int]) -> World:
            here = [names[member] for member in members]
            return World(members.index(rank), len(members), alone.device, here, members=members)

        return Mesh(
            alone,
            axis(ranks[rank % cells :: cells]),
            axis([r for r in ranks if r // cells == rank // cells and r % tensor == rank % tensor]),
            axis([r for r in ranks if r // tensor == rank // tensor]),
            axis([r for r in ranks if r // cells == rank // cells]),
        )

    def place_of(self, rank: int) -> tuple[int, int, int]:
        """The data, stage and tensor coordinates of a rank."""
        tensor = self.tensor.size
        stages = self.stages.size
        return rank // (tensor * stages), rank // tensor % stages, rank % tensor

    def drawing(self) -> str:
        """The map from ranks to places, as shown at the start of a run."""
        places = [self.place_of(rank) for rank in range(self.world.size)]
        rows = [("rank", [str(r) for r in range(self.world.size)])]
        for number, name in enumerate(("data", "stage", "tensor")):
            if max(place[number] for place in places):
                rows.append((name, [str(place[number]) for place in places]))
        width = max(len(rows[0][1][-1]), 1) + 1
        return "\n".join(f"{name:<8}" + "".join(f"{v:>{width}}" for v in row) for name, row in rows)
