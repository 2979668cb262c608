"""Reductions of tensors in a fixed order: what c10d's operations mean, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.world.shm.calls import Refused, reduction_of
from shoal.world.shm.memory import copy


class UnknownReduction(Refused, NotImplementedError):
    """A reduction that shared memory does not offer, or not of numbers of that type."""


_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_BITS = _WHOLE | {torch.bool}


class Reduction(NamedTuple):
    """What one of c10d's operations does."""

    number: int
    """What stands for it in the word of a call."""
    combine: Callable[..., Tensor]
    """Takes two parts and `out=`."""
    dtypes: frozenset[torch.dtype]
    """What it can be taken of. Complex numbers go through memory as pairs, of which only sums mean anything."""
    is_mean: bool = False


_COMBINE: dict[ReduceOp.RedOpType, tuple[Callable[..., Tensor], frozenset[torch.dtype]]] = {
    ReduceOp.SUM: (torch.add, _REAL | _COMPLEX | _BITS),
    ReduceOp.AVG: (torch.add, _REAL | _COMPLEX | _WHOLE),
    ReduceOp.PRODUCT: (torch.mul, _REAL | _BITS),
    ReduceOp.MIN: (torch.minimum, _REAL | _BITS),
    ReduceOp.MAX: (torch.maximum, _REAL | _BITS),
    ReduceOp.BAND: (torch.bitwise_and, _BITS),
    ReduceOp.BOR: (torch.bitwise_or, _BITS),
    ReduceOp.BXOR: (torch.bitwise_xor, _BITS),
}
# By their numbers: to hash one of torch's own enums takes longer than a small sum.
_REDUCTIONS = {
    op.value: Reduction(reduction_of(op), combine, dtypes, op == ReduceOp.AVG)
    for op, (combine, dtypes) in _COMBINE.items()
}
SUM = _REDUCTIONS[ReduceOp.SUM.value]


def reduction(op: ReduceOp, tensors: Sequence[Tensor]) -> Reduction:
    """The reduction that c10d's options ask for; refuse one that shared memory does not offer for such tensors."""
    kind = op.op  # type: ignore[attr-defined]  # missing in torch's declarations
    found = _REDUCTIONS.get(kind.value)
    if found is None:
        raise UnknownReduction(
            f"the shoal backend cannot reduce with {kind.name}; use SUM and scale yourself."
        )
    for tensor in tensors:
        if tensor.dtype not in found.dtypes:
            raise UnknownReduction(
                f"the shoal backend cannot reduce {str(tensor.dtype).removeprefix('torch.')} with {kind.name}; convert "
                "it first, or gather the tensors of all ranks and reduce them yourself."
            )
    return found


def reduce_in_order(op: Reduction, parts: Sequence[Tensor], out: Tensor, ranks: int) -> None:
    """out = ((p0 ∘ p1) ∘ p2) ∘ …; `out` may be p0 or p1, but no later part. A mean is one over `ranks`."""
    if len(parts) == 1:
        copy(out, parts[0])
        return
    combine = op.combine
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if op.is_mean:
        _divide(out, ranks)


def combiner(op: Reduction, ranks: int = 1) -> Callable[..., Tensor]:
    """A function of two parts and `out=`. If `ranks` is above 1 they are the last two, and a mean is divided."""
    if not op.is_mean or ranks == 1:
        return op.combine
    return lambda a, b, out: _divide(op.combine(a, b, out=out), ranks)


def _divide(total: Tensor, ranks: int) -> Tensor:
    whole = not (total.is_floating_point() or total.is_complex())  # whole numbers are cut off, as NCCL does
    return total.div_(ranks, rounding_mode="trunc" if whole else None)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors share bytes."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes
