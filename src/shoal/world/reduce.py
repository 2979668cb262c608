"""Reductions of tensors in a fixed order: what c10d's operations mean, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.world.memory import copy

_COMBINE: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def reduce_in_order(op: ReduceOp, parts: Sequence[Tensor], out: Tensor, ranks: int) -> None:
    """out = ((p0 ∘ p1) ∘ p2) ∘ …; `out` may be p0 or p1, but no later part. A mean is one over `ranks`."""
    if len(parts) == 1:
        copy(out, parts[0])
        return
    combine = combiner(op)
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if _kind(op) == ReduceOp.AVG:
        _divide(out, ranks)


def combiner(op: ReduceOp, ranks: int = 1) -> Callable[..., Tensor]:
    """A function of two parts and `out=`. If `ranks` is above 1 they are the last two, and a mean is divided."""
    combine = _COMBINE[_kind(op)]
    if _kind(op) != ReduceOp.AVG or ranks == 1:
        return combine
    return lambda a, b, out: _divide(combine(a, b, out=out), ranks)


def _divide(total: Tensor, ranks: int) -> Tensor:
    whole = not (total.is_floating_point() or total.is_complex())  # whole numbers are cut off, as NCCL does
    return total.div_(ranks, rounding_mode="trunc" if whole else None)


def check_op(op: ReduceOp) -> None:
    """Refuse a reduction that shared memory does not offer, before anything is sent."""
    if _kind(op) not in _COMBINE:
        raise NotImplementedError(
            f"the shoal backend cannot reduce with {_kind(op)}; use SUM and scale yourself."
        )


def _kind(op: ReduceOp) -> ReduceOp.RedOpType:
    kind: ReduceOp.RedOpType = op.op  # type: ignore[attr-defined]  # missing in torch's declarations
    return kind


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors share bytes."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes
