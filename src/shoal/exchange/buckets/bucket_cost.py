"""What the flat-bucket exchanges cost: the pieces that each puts together in its own `cost`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shoal.cost import Cost, ModelProfile
from shoal.world.buckets import Bucket, Piece, lay_out, pieces_of, slice_of
from shoal.world.mesh import Mesh
from shoal.world.traffic import ring_bytes
from shoal.world.world import World

NUMBER = 8
"""Bytes of a float64, in which workers tell each other counts and norms."""


def buckets_of(profile: ModelProfile, slices: int, bucket_mb: float) -> tuple[Bucket, ...]:
    """The buckets that an exchange would lay out."""
    sizes = [(p.name, p.numel, p.dtype) for p in profile.trained]
    return lay_out(sizes, slices, int(bucket_mb * 2**20), {p.name: p.share for p in profile.trained})


def shapes_of(profile: ModelProfile) -> dict[str, torch.Size]:
    return {p.name: torch.Size(p.shape) for p in profile.trained}


def bytes_of(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.nbytes for bucket in buckets)


def held_cost(profile: ModelProfile, parameters: int, gradients: int, optimizer: int) -> Cost:
    """Bytes of the parameters that learn, with all that every exchange holds besides."""
    kinds = {
        "parameters": parameters + profile.frozen_bytes,
        "buffers": profile.buffers,
        "gradients": gradients,
        "optimizer": optimizer,
    }
    return Cost(kinds)


def whole_state(profile: ModelProfile) -> int:
    """Optimizer state where a worker updates everything."""
    return sum(p.state_of(p.numel) for p in profile.trained)


def slice_state(profile: ModelProfile, buckets: Iterable[Bucket], owners: World) -> int:
    """Optimizer state of this worker's slices."""
    mine = [piece for b in buckets for piece in pieces_of(b, *slice_of(b, owners.size, owners.rank))]
    return pieces_state(profile, mine)


def pieces_state(profile: ModelProfile, pieces: Iterable[Piece]) -> int:
    by_name = {p.name: p for p in profile.trained}
    return sum(by_name[piece.name].state_of(piece.numel) for piece in pieces)


def agreement_cost(profile: ModelProfile, world: World, owners: World, mesh: Mesh) -> Cost:
    """The loss, who had a gradient, and the norm where a step takes it: all that workers tell each other."""
    numbers = ring_bytes((2 + len(profile.trained)) * NUMBER, world.size)
    found = Cost(wire={"data": numbers})
    return found + norm_cost(owners, mesh) if profile.norm else found


def norm_cost(owners: World, mesh: Mesh) -> Cost:
    """One number of each owner, then one of each worker that holds a part of the model."""
    return Cost(wire={"data": gathered_number(owners.size)}) + model_number(mesh)


def model_number(mesh: Mesh) -> Cost:
    """A number that all who hold one model between them tell each other."""
    axis = "stage" if mesh.stages.size > 1 else "tensor"
    return Cost(wire={axis: gathered_number(mesh.model.size)}) if mesh.model.size > 1 else Cost()


def gathered_number(workers: int, numbers: int = 1) -> int:
    """`World.gather_numbers` of so many numbers: an all-reduce of the table."""
    return ring_bytes(workers * numbers * NUMBER, workers)


def barrier_bytes(workers: int) -> int:
    return ring_bytes(torch.float32.itemsize, workers)


def reductions(profile: ModelProfile, compressed: bool, always: bool = False) -> int:
    """How often a step reduces all buckets: once, or after each micro-batch (see bucketed_exchange.py)."""
    each = always or (profile.deterministic and not compressed)
    return profile.passes if each else 1


def adds_slices(profile: ModelProfile, compressed: bool) -> bool:
    """Whether zero1 and shared keep sums of slices, as in deterministic mode with several micro-batches."""
    return profile.deterministic and profile.accumulate > 1 and not compressed
