"""Optimizer state between the form it is kept in (pieces of slices) and the form it is stored in (whole, by name).

Entries that have one number per element of the parameter are cut and joined with it; anything else (the step
count of Adam) belongs to the parameter as a whole and is the same in each of its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import optim

from shoal.exchange.contract import State, detached
from shoal.world.buckets import Bucket, Piece
from shoal.world.world import World

ByPiece = dict[str, list[tuple[Piece, dict[str, torch.Tensor]]]]
"""This rank's pieces of each parameter, with what its optimizer keeps of them."""


@dataclass(frozen=True)
class Kept:
    """How an exchange keeps its state: pieces with the tensors the optimizer knows them by."""

    shapes: Mapping[str, torch.Size]
    """Shape of each parameter, as this worker and its peers hold it between them."""
    buckets: Sequence[Bucket]
    pieces: Sequence[tuple[Piece, torch.Tensor]]
    optimizer: optim.Optimizer
    owners: World


def join_state(kept: Kept) -> State:
    """The whole state by parameter name, on every rank. Collective."""
    local: ByPiece = {}
    kinds: dict[str, list[str]] = {}
    for piece, target in kept.pieces:
        entries = detached(kept.optimizer.state.get(target, {}))
        local.setdefault(piece.name, []).append((piece, entries))
        for key, value in entries.items():
            each = value.numel() == piece.numel and value.dim() > 0
            if each or key not in kinds:
                kinds[key] = ["each" if each else "one", str(value.dtype).removeprefix("torch.")]
    agreed: dict[str, list[str]] = {}
    # A rank that holds no piece, or whose optimizer has made no step yet, does not know the keys: collect them.
    for theirs in kept.owners.gather_values(kinds):
        agreed.update({key: kind for key, kind in theirs.items() if key not in agreed or kind[0] == "each"})
    whole: State = {name: {} for name in kept.shapes}
    present = _present(kept, local)
    # Sorted: each key is a collective, which all ranks have to start in one order.
    for key, (kind, dtype) in sorted(agreed.items()):
        if kind == "each":
            _join_each(kept, key, getattr(torch, dtype), local, whole)
        else:
            _join_one(kept, key, getattr(torch, dtype), local, whole)
    return {name: entries for name, entries in whole.items() if name in present}


def cut_state(kept: Kept, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Give the optimizer this rank's pieces of a whole state."""
    per_element = _per_element(kept, state)
    for piece, target in kept.pieces:
        if piece.name not in state:
            continue
        shape = kept.shapes[piece.name]
        mine: dict[str, torch.Tensor] = {}
        for key, value in state[piece.name].items():
            if value.shape == shape and key in per_element:
                part = value.reshape(-1)[piece.offset : piece.offset + piece.numel]
                mine[key] = part.reshape(target.shape).to(target.device, copy=True)
            else:
                mine[key] = value.clone()
        kept.optimizer.state[target] = mine


def _per_element(kept: Kept, state: Mapping[str, Mapping[str, torch.Tensor]]) -> set[str]:
    """The keys with a number per element. Parameters of one number cannot tell: there, all entries look alike."""
    telling = [name for name in state if len(kept.shapes[name]) > 0]
    if not telling:
        return {key for entries in state.values() for key in entries} - {"step"}
    shapes = {name: kept.shapes[name] for name in telling}
    return {key for name in telling for key, value in state[name].items() if value.shape == shapes[name]}


def _present(kept: Kept, local: ByPiece) -> set[str]:
    flags = [float(any(entries for _, entries in local.get(name, []))) for name in kept.shapes]
    anywhere = kept.owners.gather_numbers(flags).sum(0).tolist()
    return {name for name, flag in zip(kept.shapes, anywhere, strict=True) if flag > 0}


def _join_each(kept: Kept, key: str, dtype: torch.dtype, local: ByPiece, whole: State) -> None:
    for bucket in kept.buckets:
        vector = torch.zeros(bucket.size, dtype=dtype, device="cpu")
        for place in bucket.places:
            for piece, entries in local.get(place.name, []):
                if key in entries:
                    vector[piece.start : piece.start + piece.numel] = entries[key].reshape(-1).cpu()
        # Bucket by bucket, so that one bucket of extra memory is enough.
        width = bucket.size // kept.owners.size
        mine = vector[kept.owners.rank * width : (kept.owners.rank + 1) * width].clone()
        kept.owners.all_gather(vector, mine).wait()
        for place in bucket.places:
            part = vector[place.start : place.start + place.numel]
            whole[place.name][key] = part.view(kept.shapes[place.name]).clone()


def _join_one(kept: Kept, key: str, dtype: torch.dtype, local: ByPiece, whole: State) -> None:
    def mine(name: str) -> float:
        return max(
            (float(entries[key]) for _, entries in local.get(name, []) if key in entries), default=-1e300
        )

    # One number a parameter (a count of steps): equal wherever it is known, so the maximum is it.
    rows = kept.owners.gather_numbers([mine(name) for name in kept.shapes])
    for name, value in zip(kept.shapes, rows.amax(0).tolist(), strict=True):
        whole[name][key] = torch.tensor(value, dtype=dtype, device="cpu")
