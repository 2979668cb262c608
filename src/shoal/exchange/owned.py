"""What a replica has of its own, as part of a run's state: what compression has not sent, what its optimizer knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shoal.exchange.base import Exchange, Held, Owned
from shoal.exchange.reducer import Reducer
from shoal.world.buckets import Bucket, Piece, pieces_of


def unsent(reducer: Reducer, saving: bool) -> list[Owned]:
    """What a reducer has not sent yet, by parameter. Saved, it is of whole parameters: zero where others hold it."""
    found = [
        Owned(
            "residual",
            Held(piece.name, piece.offset, _cut(left.tensor, piece.start - left.start, piece.numel)),
            holders=left.holders,
        )
        for left in reducer.residuals()
        for piece in pieces_of(left.bucket, left.start, left.start + left.tensor.numel())
    ]
    return _whole(found, reducer) if saving else found


def lay_out_keeping(
    reducer: Reducer, buckets: Sequence[Bucket], shapes: Mapping[str, torch.Size], scattered: bool
) -> None:
    """Let a reducer know of other buckets; what it had not sent, it has not sent still."""
    before = {owned.held.name: owned.held.tensor.clone() for owned in unsent(reducer, saving=True)}
    reducer.lay_out(buckets, shapes, scattered)
    for owned in unsent(reducer, saving=False) if before else ():
        start, stop = owned.held.start, owned.held.start + owned.held.tensor.numel()
        owned.held.tensor.copy_(before[owned.held.name][start:stop])


def leave_unused(
    reducer: Reducer,
    buckets: Sequence[Bucket],
    unused: Sequence[Piece],
    results: Sequence[torch.Tensor],
    ranges: Sequence[tuple[int, int]],
) -> None:
    """Nobody had a gradient for some parameters, though a compressor may say something of them: it is kept."""
    for piece in unused:
        start = piece.start - ranges[piece.bucket][0]
        result = results[piece.bucket][start : start + piece.numel]
        reducer.give_back(buckets[piece.bucket], piece.start, piece.start + piece.numel, result)
        result.zero_()


def own_optimizer_state(exchange: Exchange) -> list[Owned]:
    """The state of an optimizer that has seen only this replica's gradients: what it has of each element."""
    state, targets = (
        exchange.optimizer.state,
        [t for t in exchange.targets() if t.tensor in exchange.optimizer.state],
    )
    each = {
        key
        for target in targets
        for key, value in state[target.tensor].items()
        if isinstance(value, torch.Tensor) and value.shape == target.tensor.shape and key != "step"
    }
    return [
        Owned(f"state-{key}", Held(target.name, target.start, state[target.tensor][key]))
        for target in targets
        for key in sorted(each & state[target.tensor].keys())
    ]


def _whole(found: list[Owned], reducer: Reducer) -> list[Owned]:
    sizes = {place.name: place.numel for left in reducer.residuals() for place in left.bucket.places}
    by_name: dict[str, list[Owned]] = {name: [] for name in sizes}
    for owned in found:
        by_name[owned.held.name].append(owned)
    return [_joined(name, parts, sizes[name]) for name, parts in by_name.items() if parts]


def _joined(name: str, parts: list[Owned], size: int) -> Owned:
    first = parts[0]
    if first.held.tensor.numel() == size:
        return first
    whole = torch.zeros(size, dtype=first.held.tensor.dtype, device=first.held.tensor.device)
    for part in parts:
        whole[part.held.start : part.held.start + part.held.tensor.numel()] = part.held.tensor
    return Owned(first.kind, Held(name, 0, whole), holders=first.holders)


def _cut(tensor: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    return tensor[start : start + numel]
