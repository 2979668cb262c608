"""What operations of a dense shard ask for, read from plain values and checked: anybody may have sent them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from shoal.errors import ConfigError
from shoal.server.dense.trained_vector import Entry, VectorPiece
from shoal.server.protocol.dense_messages import StateEntry, UpdateArguments
from shoal.server.protocol.joined_tensors import DTYPES
from shoal.server.protocol.optimizer_description import Settings
from shoal.server.protocol.state_machine import Operation, Refused, natural


@dataclass(frozen=True, slots=True)
class Named:
    """Parts of a step, in order."""

    parts: tuple[int, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    named: Named
    factor: float
    limit: float | None
    settings: list[Settings] | None
    used: list[int] | None
    share: float
    floor: int


def number(value: object, what: str, least: float = -math.inf) -> float:
    """A finite number."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < least
    ):
        raise Refused(f"{what} is {value!r}; it has to be a finite number.")
    return float(value)


def named(pairs: Iterable[Iterable[object]]) -> Named:
    """Parts with their counts of samples, sorted by part."""
    found = sorted((natural(part, "a part"), number(count, "a count", 0)) for part, count in pairs)
    return Named(distinct([part for part, _ in found]), tuple(count for _, count in found))


def distinct(parts: Sequence[object]) -> tuple[int, ...]:
    """Parts, sorted, each once."""
    found = sorted(natural(part, "a part") for part in parts)
    if len(set(found)) < len(found):
        raise Refused(f"parts {found} name one twice; name each once.")
    return tuple(found)


def update(args: UpdateArguments, pieces: int) -> Update:
    """The arguments of `apply`."""
    factor = number(args.get("factor", 1.0), "factor")
    if not factor:
        raise Refused("factor is 0, which leaves no gradient; drop the step instead.")
    limit = args.get("limit")
    settings = args.get("settings")
    used = args.get("used")
    return Update(
        named(args["parts"]),
        factor,
        None if limit is None else number(limit, "limit", 0),
        None if settings is None else [dict(group) for group in settings],
        None if used is None else indices(used, pieces),
        number(args.get("share", 1.0), "share", 0),
        natural(args.get("floor", 0), "floor"),
    )


def indices(numbers: Iterable[object], pieces: int) -> list[int]:
    """Numbers of pieces."""
    found = [natural(index, "a piece") for index in numbers]
    if any(index >= pieces for index in found):
        raise Refused(f"piece {max(found)} was named, and there are {pieces}.")
    return found


def pieces(triples: Iterable[Iterable[object]], size: int) -> list[VectorPiece]:
    """The pieces of a vector: within it, and none over another."""
    found = [VectorPiece(*(natural(n, "a number of a piece") for n in triple)) for triple in triples]
    end = 0
    for piece in sorted(found, key=lambda p: (p.start, p.numel)):
        if piece.start < end or piece.start + piece.numel > size:
            raise Refused(
                f"a piece of {piece.numel} elements at {piece.start} is over another or past the end, {size}."
            )
        end = piece.start + piece.numel
    return found


def entry(args: StateEntry, tensor: torch.Tensor | None, size: int, count: int) -> Entry:
    """The arguments of `state`."""
    here = indices(args["pieces"], count)
    key = str(args["key"])
    if args["each"]:
        whole = flat(tensor, size)
        return Entry(key, here, True, whole.dtype, whole)
    if args["values"] is None:
        raise Refused(f"no values of '{key}' came; give one a piece.")
    values = [float(value) for value in args["values"]]
    if len(values) != len(here):
        raise Refused(f"{len(values)} values of '{key}' came for {len(here)} pieces; give one a piece.")
    dtype = DTYPES[str(args.get("dtype", "float32"))]
    return Entry(key, here, False, dtype, torch.tensor(values, dtype=torch.float64).to(dtype))


def flat(tensor: torch.Tensor | None, size: int | None = None) -> torch.Tensor:
    """The numbers that came along, one for each value."""
    usual = tensor is not None and tensor.is_floating_point() and tensor.dtype in DTYPES.values()
    if tensor is None or not usual or tensor.dim() != 1:
        raise Refused("a flat vector of floating-point numbers has to come along, and none did.")
    if size is not None and tensor.numel() != size:
        raise Refused(f"{tensor.numel()} numbers came, and the shard has {size} values.")
    return tensor


def refusal(op: Operation, error: Exception) -> Refused:
    """In a sentence: what was asked, and why it cannot be."""
    if isinstance(error, Refused | ConfigError):
        return Refused(f"{op.name} of step {op.clock}: {error}")
    return Refused(f"{op.name} of step {op.clock} cannot be read: {type(error).__name__} {error}.")
