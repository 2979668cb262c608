"""Which part of a parameter each tensor rank holds, and the way from whole to part and back.

A parameter is cut along one dimension. What lies along that dimension may be packed out of several groups (the
queries, keys and values of an attention in one matrix); each group is cut by itself, so that every rank gets its
heads of each. Parts follow `torch.chunk`: the first ranks get the larger ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TensorCut:
    """How one parameter is cut: along `dim`, whose length is packed out of `groups`.

    >>> TensorCut(0, (6, 6, 6)).local(degree=2, rank=1)
    9
    >>> TensorCut(1, (7,)).spans(degree=2, rank=1)
    [(4, 3)]
    """

    dim: int
    groups: tuple[int, ...]

    def spans(self, degree: int, rank: int) -> list[tuple[int, int]]:
        """Where the parts of `rank` lie along the dimension: start and length, one per group."""
        begins = accumulate(self.groups, initial=0)
        found = []
        for begin, size in zip(begins, self.groups, strict=False):
            # Rounded up, as torch's chunk does: all parts but the last ones are equal.
            share = -(-size // degree)
            start = min(size, rank * share)
            found.append((begin + start, min(size, start + share) - start))
        return found

    def local(self, degree: int, rank: int) -> int:
        """The length of what `rank` holds."""
        return sum(length for _, length in self.spans(degree, rank))

    def even(self, degree: int) -> bool:
        """Do all ranks hold equally much?"""
        return all(size % degree == 0 for size in self.groups)


@dataclass(frozen=True)
class TensorLayout:
    """What the tensor ranks hold: a `TensorCut` for each cut parameter, by name; all others are whole everywhere."""

    pieces: Mapping[str, TensorCut]
    degree: int

    def shares(self, name: str) -> float:
        """The weight of this rank's part in a sum over ranks: 1 if cut, 1/degree if all hold the same.

        >>> layout = TensorLayout({"up.weight": TensorCut(0, (8,))}, degree=4)
        >>> layout.shares("up.weight"), layout.shares("norm.weight")
        (1.0, 0.25)
        """
        return 1.0 if name in self.pieces else 1.0 / self.degree


def cut(name: str, whole: Tensor, layout: TensorLayout, rank: int) -> Tensor:
    """The part of `whole` (the parameter `name`, or a tensor of its shape) that tensor rank `rank` holds.

    >>> layout = TensorLayout({"qkv": TensorCut(0, (2, 2, 2))}, degree=2)
    >>> cut("qkv", torch.arange(6), layout, rank=1)
    tensor([1, 3, 5])
    """
    piece = layout.pieces.get(name)
    if piece is None:
        return whole
    parts = [whole.narrow(piece.dim, *span) for span in piece.spans(layout.degree, rank)]
    return torch.cat(parts, piece.dim).contiguous()


def assemble(name: str, parts: list[Tensor], layout: TensorLayout) -> Tensor:
    """The whole tensor out of the parts of all ranks, in rank order.

    >>> layout = TensorLayout({"qkv": TensorCut(0, (2, 2, 2))}, degree=2)
    >>> assemble("qkv", [torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5])], layout)
    tensor([0, 1, 2, 3, 4, 5])
    """
    piece = layout.pieces[name]
    shape = list(parts[0].shape)
    shape[piece.dim] = sum(piece.groups)
    whole = parts[0].new_empty(shape)
    for rank, part in enumerate(parts):
        taken = 0
        for start, length in piece.spans(layout.degree, rank):
            whole.narrow(piece.dim, start, length).copy_(part.narrow(piece.dim, taken, length))
            taken += length
    return whole


def join(name: str, local: Tensor, layout: TensorLayout, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole tensor of which `local` is this rank's part. All ranks of the tensor `group` call it together."""
    piece = layout.pieces.get(name)
    if piece is None:
        return local
    sizes = [piece.local(layout.degree, rank) for rank in range(layout.degree)]
    padded = pad(local.detach(), piece.dim, max(sizes))
    # all_gather takes equal parts.
    table = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(table, padded, group=group)
    parts = [part.narrow(piece.dim, 0, size) for part, size in zip(table, sizes, strict=True)]
    return assemble(name, parts, layout)


def pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    """`tensor`, contiguous, made `size` long along `dim`; what is added is not meant to be read."""
    if tensor.shape[dim] == size:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = size
    longer = tensor.new_zeros(shape)
    longer.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return longer


def whole_like(part: Tensor, axis: int, size: int) -> Tensor:
    """An empty tensor, `size` long along `axis`, that lies in memory as `part` does.

    Not only for speed: dropout draws its masks in the order of memory.


    >>> whole_like(torch.zeros(3, 2).t(), 0, 4).stride()
    (1, 4)
    """
    shape = list(part.shape)
    shape[axis] = size
    strides = part.stride()
    order = sorted(range(part.ndim), key=lambda dim: (-strides[dim], dim))
    return torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device)
