"""State that each replica has of its own: residuals of compression, and the state of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shoal.exchange.contract import Exchange, ExtraState, LocalShard
from shoal.exchange.reduce.reducer import Reducer
from shoal.world.buckets import Bucket, Piece, pieces_of


def unsent(reducer: Reducer, saving: bool) -> list[ExtraState]:
    """A reducer's residuals, by parameter. To be saved they are of whole parameters, zero where others hold them."""
    found = [
        ExtraState(
            "residual",
            LocalShard(piece.name, piece.offset, _cut(left.tensor, piece.start - left.start, piece.numel)),
            holders=left.holders,
        )
        for left in reducer.residuals()
        for piece in pieces_of(left.bucket, left.start, left.start + left.tensor.numel())
    ]
    return _whole(found, reducer) if saving else found


def lay_out_keeping(
    reducer: Reducer, buckets: Sequence[Bucket], shapes: Mapping[str, torch.Size], scattered: bool
) -> None:
    """Give a reducer other buckets, and keep its residuals."""
    # By parameter: what a bucket is, and where in it a parameter lies, changes with the layout.
    before = {owned.held.name: owned.held.tensor.clone() for owned in unsent(reducer, saving=True)}
    reducer.lay_out(buckets, shapes, scattered)
    put_back(reducer, before)


def put_back(reducer: Reducer, before: Mapping[str, torch.Tensor]) -> None:
    """Give a reducer these residuals, by parameter."""
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
    """Some parameters had no gradient on any worker: what a compressor sent for them returns to their residuals."""
    for piece in unused:
        start = piece.start - ranges[piece.bucket][0]
        result = results[piece.bucket][start : start + piece.numel]
        reducer.give_back(buckets[piece.bucket], piece.start, piece.start + piece.numel, result)
        result.zero_()


def own_optimizer_state(exchange: Exchange) -> list[ExtraState]:
    """The state of an optimizer that has seen only this replica's gradients: what it has of each element."""
    state, targets = (
        exchange.optimizer.state,
        [t for t in exchange.optimizer_shards() if t.tensor in exchange.optimizer.state],
    )
    each = {
        key
        for target in targets
        for key, value in state[target.tensor].items()
        if isinstance(value, torch.Tensor) and value.shape == target.tensor.shape and key != "step"
    }
    return [
        ExtraState(f"state-{key}", LocalShard(target.name, target.start, state[target.tensor][key]))
        for target in targets
        for key in sorted(each & state[target.tensor].keys())
    ]


def _whole(found: list[ExtraState], reducer: Reducer) -> list[ExtraState]:
    sizes = {place.name: place.numel for left in reducer.residuals() for place in left.bucket.places}
    by_name: dict[str, list[ExtraState]] = {name: [] for name in sizes}
    for owned in found:
        by_name[owned.held.name].append(owned)
    return [_joined(name, parts, sizes[name]) for name, parts in by_name.items() if parts]


def _joined(name: str, parts: list[ExtraState], size: int) -> ExtraState:
    first = parts[0]
    if first.held.tensor.numel() == size:
        return first
    whole = torch.zeros(size, dtype=first.held.tensor.dtype, device=first.held.tensor.device)
    for part in parts:
        whole[part.held.start : part.held.start + part.held.tensor.numel()] = part.held.tensor
    return ExtraState(first.kind, LocalShard(name, 0, whole), holders=first.holders)


def _cut(tensor: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    return tensor[start : start + numel]
