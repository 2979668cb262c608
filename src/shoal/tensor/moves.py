"""How data passes between what all ranks hold and what each has a part of, forward and backward.

The names of what comes in and out: *same* on all ranks, *parts* along a dimension, *terms* of a sum.
Backward, the gradient of what is the same is the same, the gradient of a part is that part, and data that is the same
but used by each rank for its own part has a gradient in terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ConfigError
from shoal.tensor.layout import pad, whole_like
from shoal.torch_private import all_gather, reduce_scatter


@dataclass(frozen=True, eq=False)
class Ring:
    """The ranks that share each layer."""

    group: dist.ProcessGroup
    rank: int
    degree: int


class Move(Protocol):
    """One of the functions below with its settings given."""

    def __call__(self, x: Tensor) -> Tensor: ...


def total(x: Tensor, ring: Ring) -> Tensor:
    """The sum over ranks, in new memory."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=ring.group)
    return result


def gathered(x: Tensor, ring: Ring, dim: int, sizes: list[int]) -> Tensor:
    """The parts of all ranks one after the other; rank i has `sizes[i]` along `dim`."""
    # all_gather takes equal parts: ranks with fewer heads or words pad theirs, and the rest is cut off again below.
    padded = pad(x, dim, max(sizes))
    table = padded.new_empty((ring.degree, *padded.shape))
    flat = table.view(ring.degree * padded.shape[0], *padded.shape[1:])
    all_gather(ring.group, flat, padded).wait()
    whole = whole_like(x, dim, sum(sizes))
    for part, piece in zip(table, whole.split_with_sizes(sizes, dim), strict=True):
        piece.copy_(part.narrow(dim, 0, piece.shape[dim]))
    return whole


def reduced(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """This rank's even part, along `dim`, of the sum over ranks."""
    # reduce_scatter cuts the first dimension: bring the parts there.
    parts = torch.stack(x.chunk(ring.degree, dim)).contiguous()
    result = torch.empty_like(parts[0])
    flat = parts.view(ring.degree * parts.shape[1], *parts.shape[2:])
    reduce_scatter(ring.group, result, flat).wait()
    return result


def own(x: Tensor, ring: Ring, dim: int, sizes: list[int]) -> Tensor:
    """This rank's part of what is the same."""
    # A copy: a view would keep the whole tensor in memory for the backward pass.
    return x.narrow(dim, sum(sizes[: ring.rank]), sizes[ring.rank]).clone()


class _Context(torch.autograd.function.FunctionCtx):
    """What a forward move keeps for its backward."""

    ring: Ring
    dim: int
    sizes: list[int]


# Each backward is another of these moves, so that a gradient can be differentiated once more.


# Megatron-LM (Shoeybi et al., 2019) calls enter and leave f and g; spread and settle are g and its conjugate of
# sequence parallelism (Korthikanti et al., 2022).
class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        # A new tensor object, so that autograd gives it a node of its own.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        return leave(grads[0], ctx.ring), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return total(x, ring)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        return enter(grads[0], ctx.ring), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, ring: Ring, dim: int, sizes: list[int]) -> Tensor:
        ctx.ring = ring
        ctx.dim = dim
        ctx.sizes = sizes
        return gathered(x, ring, dim, sizes)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _applied(_Part, grads[0], ctx.ring, ctx.dim, ctx.sizes), None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, ring: Ring, dim: int, sizes: list[int]) -> Tensor:
        ctx.ring = ring
        ctx.dim = dim
        ctx.sizes = sizes
        return own(x, ring, dim, sizes)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return collect(grads[0], ctx.ring, ctx.dim, ctx.sizes), None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, ring: Ring, dim: int) -> Tensor:
        ctx.ring = ring
        ctx.dim = dim
        return gathered(x, ring, dim, [x.shape[dim]] * ring.degree)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        return settle(grads[0], ctx.ring, ctx.dim), None, None


class _Settle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, ring: Ring, dim: int) -> Tensor:
        ctx.ring = ring
        ctx.dim = dim
        even(x, ring, dim)
        return reduced(x, ring, dim)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        return spread(grads[0], ctx.ring, ctx.dim), None, None


def enter(x: Tensor, ring: Ring) -> Tensor:
    """Same → same, used in parts: the gradient is summed."""
    return _applied(_Enter, x, ring)


def leave(x: Tensor, ring: Ring) -> Tensor:
    """Terms → same: the sum."""
    return _applied(_Leave, x, ring)


def collect(x: Tensor, ring: Ring, dim: int, sizes: list[int]) -> Tensor:
    """Parts → same."""
    return _applied(_Collect, x, ring, dim, sizes)


def part(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """Same → even parts."""
    return _applied(_Part, x, ring, dim, [even(x, ring, dim)] * ring.degree)


def rejoin(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """Even parts → same."""
    return collect(x, ring, dim, [x.shape[dim]] * ring.degree)


def spread(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """Even parts → same, used in parts of another kind: the gradient is summed and parted."""
    return _applied(_Spread, x, ring, dim)


def settle(x: Tensor, ring: Ring, dim: int) -> Tensor:
    """Terms → even parts of the sum."""
    return _applied(_Settle, x, ring, dim)


def even(x: Tensor, ring: Ring, dim: int) -> int:
    """The length of a rank's part of the sequence, which must come out even."""
    length = x.shape[dim]
    if length % ring.degree:
        raise ConfigError(
            f"a sequence of {length} positions cannot be shared evenly by tp{ring.degree}(sequence=true); "
            f"pad sequences to a multiple of {ring.degree}, or leave sequence out."
        )
    return length // ring.degree


def _applied(function: type[torch.autograd.Function], *args: object) -> Tensor:
    result = function.apply(*args)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result
