"""What zero3's units cost: rows held, units gathered, gradients scattered. FSDP2 pads each parameter to equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.cost import ModelProfile, ParameterProfile
from shoal.exchange.fsdp.all_gather import AHEAD
from shoal.exchange.fsdp.units import GATHER, UnitOptions, can_be_cut
from shoal.world.traffic import ring_bytes, share_of


@dataclass(frozen=True)
class UnitSize:
    """Bytes of one unit."""

    name: str
    gathered: int
    """All its parameters in the type in which they travel, padded."""
    summed: int
    """The gradients of those that learn, padded."""


def padded_bytes(parameter: ParameterProfile, shards: int) -> int:
    """What each worker holds of a parameter that is cut by rows."""
    rows = -(-parameter.shape[0] // shards)
    return rows * (parameter.nbytes // parameter.shape[0])


def rows_held(parameter: ParameterProfile, shards: int, rank: int) -> int:
    """Elements of the rows that are really this worker's: the last workers may have fewer, or none."""
    rows = -(-parameter.shape[0] // shards)
    first = min(parameter.shape[0], rank * rows)
    held = min(parameter.shape[0], first + rows) - first
    return held * (parameter.numel // parameter.shape[0])


def cut_and_whole(
    profile: ModelProfile, shards: int
) -> tuple[list[ParameterProfile], list[ParameterProfile]]:
    """The parameters that are cut, and those that every worker holds."""
    if shards == 1:
        return [], list(profile.parameters)
    cut: list[ParameterProfile] = []
    for name in unit_names(profile):
        unit = [p for p in profile.parameters if p.unit == name]
        cut += [p for p, able in zip(unit, can_be_cut(unit), strict=True) if able]
    held = {p.name for p in cut}
    return cut, [p for p in profile.parameters if p.name not in held]


def unit_names(profile: ModelProfile) -> list[str]:
    """Units in the order of the forward pass, the root's last."""
    inner = dict.fromkeys(p.unit for p in reversed(profile.parameters) if p.unit)
    return [*inner, ""]


def unit_sizes(
    profile: ModelProfile, cut: Sequence[ParameterProfile], shards: int, gather: str
) -> list[UnitSize]:
    """The units that have parameters, in the order of the forward pass, the root's last."""
    sizes = []
    for name in unit_names(profile):
        unit = [p for p in cut if p.unit == name]
        narrow = GATHER[gather] if any(p.trained for p in (unit if name else cut)) else None
        gathered = sum(
            padded_bytes(p, shards) * shards // p.dtype.itemsize * (narrow or p.dtype).itemsize for p in unit
        )
        summed = sum(padded_bytes(p, shards) * shards for p in unit if p.trained)
        sizes.append(UnitSize(name, gathered, summed))
    return sizes


def gathered_at_once(units: Sequence[UnitSize], reshard: bool) -> int:
    """The most bytes of gathered parameters: the root, the unit that computes, and the one fetched ahead of it."""
    *inner, root = units
    if not reshard or len(inner) <= AHEAD + 1:
        return sum(unit.gathered for unit in units)
    return root.gathered + max(a.gathered + b.gathered for a, b in pairwise(inner))


def unit_traffic(profile: ModelProfile, units: Sequence[UnitSize], shards: int, options: UnitOptions) -> int:
    """Gathers and reduce-scatters of a step. A pipeline keeps its units gathered through all micro-batches."""
    *inner, root = units
    again = 2 if options.reshard and profile.stages is None else 1
    gathers = again * sum(share_of(unit.gathered, shards) for unit in inner) + share_of(root.gathered, shards)
    sums = sum(share_of(unit.summed, shards) for unit in units)
    return profile.passes * (gathers + sums)


def replica_traffic(
    profile: ModelProfile, units: Sequence[UnitSize], rows: Sequence[int], shards: int, replicas: int
) -> int:
    """Sums between those who hold the same rows: unit by unit; in a pipeline, one of each parameter (`rows`, bytes)."""
    vectors = rows if profile.stages is not None else [unit.summed // shards for unit in units if unit.summed]
    return sum(ring_bytes(nbytes, replicas) for nbytes in vectors)
