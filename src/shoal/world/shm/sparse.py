"""All-reduce of sparse tensors: everybody gathers everybody's numbers and where they belong, and adds them up."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.world.shm.calls import Refused
from shoal.world.shm.collectives import Rounds, Staging

_AXES = 32
"""Room for what a rank says about its tensor: shapes may have other lengths on other ranks."""


def all_reduce(ops: Staging, tensor: Tensor) -> Rounds:
    """`tensor` of every rank becomes the sum of all, in rank order, whatever elements each has."""
    mine = tensor.detach().coalesce()
    axes = [mine.values().shape[0], mine.sparse_dim(), *mine.shape]
    shape = torch.tensor(axes + [-1] * (_AXES - len(axes)), device="cpu")
    shapes = [torch.empty_like(shape) for _ in range(ops.size)]
    yield from _gather(ops, shapes, shape)
    if any(not torch.equal(other[1:], shape[1:]) for other in shapes):
        raise Refused(
            f"a sparse all_reduce got tensors of other shapes: {[other[other >= 0].tolist()[2:] for other in shapes]}."
        )
    counts = [int(other[0]) for other in shapes]
    indices = [torch.empty(mine.sparse_dim(), count, dtype=torch.int64, device="cpu") for count in counts]
    yield from _gather(ops, indices, mine.indices())
    values = [mine.values().new_empty(count, *mine.values().shape[1:]) for count in counts]
    yield from _gather(ops, values, mine.values())
    total = torch.sparse_coo_tensor(indices[0], values[0], mine.shape)
    for where, what in zip(indices[1:], values[1:], strict=True):
        total = total + torch.sparse_coo_tensor(where, what, mine.shape)
    with torch.no_grad():  # a detached alias would not see its number of elements change
        tensor.copy_(total.coalesce())


def _gather(ops: Staging, outputs: list[Tensor], data: Tensor) -> Rounds:
    flat = [_as_bytes(out) for out in outputs]
    return ops.gather(flat, _as_bytes(data), max(out.numel() for out in flat))


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.contiguous().view(-1).view(torch.uint8)
