"""What a rank says about its call: one word, which the ranks compare before they touch data.

In shared memory it stands beside the counter of a rank; between hosts it is the first message (`network/compared.py`).

A collective that is not the same call on all ranks would otherwise add numbers to other numbers. The word holds the
operation, the type and number of elements, how they are reduced, the root, and two bits of how many collectives there
have been; from a word that differs, the others' call can be read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ReduceOp

from shoal.errors import ShoalError


class CollectiveMismatch(ShoalError, DistBackendError):
    """The ranks of a group have called different collectives."""


class Refused(ValueError):
    """A call that cannot be right whatever the other ranks call: raised before anything is sent."""


_KINDS = (
    "nothing",
    "all_reduce",
    "all_reduce_coalesced",
    "sparse_all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_parts",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all of uneven parts",
    "barrier",
    "monitored_barrier",
    "a call that it refused",
    "what its own host did not agree on",
)
_BARE = {
    "nothing",
    "barrier",
    "monitored_barrier",
    "a call that it refused",
    "what its own host did not agree on",
}
"""Kinds of which the word says nothing more."""
_DTYPES = tuple(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
_OPS = (
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)

# 34 bits of elements, 1 for several tensors, 10 of root, 4 of reduction, 6 of type, 5 of kind, 2 of sequence
_SEVERAL = 1 << 34
"""Set if a call has several tensors: the bits below are then drawn from all their sizes and types."""
_PRIME = 17179869143
"""The largest prime below: what many tensors are mixed to is cut to its size, by all of its bits."""
_LARGE = (1 << 89) - 1
_ROOT = 35
_OP = 45
_DTYPE = 49
_KIND = 55
SEQUENCE = 62
"""Where the two lowest bits of the number of collectives stand."""
_SPREAD = 0x9E3779B1

assert len(_DTYPES) <= 64
assert len(_KINDS) <= 32
_DTYPE_NUMBER = {dtype: number << _DTYPE for number, dtype in enumerate(_DTYPES)}


def kind_of(name: str) -> int:
    """What the words of all calls of that kind have in common."""
    return _KINDS.index(name) << _KIND


def reduction_of(op: ReduceOp.RedOpType) -> int:
    """What the words of all calls with that reduction have in common."""
    return _OPS.index(op) << _OP


def word_of(kind: int, tensors: Sequence[Tensor], reduction: int = 0, root: int = 0) -> int:
    """The word of a call, without its sequence."""
    if len(tensors) == 1:
        first = tensors[0]
        return kind | reduction | root << _ROOT | _DTYPE_NUMBER[first.dtype] | first.numel()
    word = kind | reduction | root << _ROOT
    if not tensors:
        return word
    mixed = len(tensors)
    for tensor in tensors:
        # A polynomial hash: two lists of the same sizes in another order differ.
        mixed = mixed * _SPREAD + tensor.numel() + _DTYPE_NUMBER[tensor.dtype] & _LARGE
    return word | _DTYPE_NUMBER[tensors[0].dtype] | _SEVERAL | mixed % _PRIME


def read(word: int) -> str:
    """The call that a word stands for.

    >>> read(word_of(kind_of("broadcast"), [torch.zeros(10)], root=1))
    'broadcast from rank 1 of 10 float32'
    >>> read(word_of(kind_of("all_reduce"), [torch.zeros(3), torch.zeros(4)], reduction_of(ReduceOp.MAX)))
    'all_reduce (MAX) of several tensors, the first of float32'
    """
    kind = _KINDS[word >> _KIND & 31]
    if kind in _BARE:
        return kind
    text = kind
    if "reduce" in kind and kind != "reduce_parts":
        text += f" ({_OPS[word >> _OP & 15].name})"
    root = word >> _ROOT & 1023
    text += {"broadcast": f" from rank {root}", "scatter": f" from rank {root}"}.get(kind, "")
    text += {"reduce": f" to rank {root}", "gather": f" to rank {root}"}.get(kind, "")
    dtype = str(_DTYPES[word >> _DTYPE & 63]).removeprefix("torch.")
    if word & _SEVERAL:
        return f"{text} of several tensors, the first of {dtype}"
    if kind in ("reduce_parts", "all_to_all of uneven parts", "sparse_all_reduce"):
        return f"{text} of {dtype}"
    return f"{text} of {word % _SEVERAL} {dtype}"


def mismatch(words: Sequence[int], harm: str = "No tensor was changed") -> CollectiveMismatch:
    """The sentence about the words of all ranks, which are not all the same: the same on every rank."""
    other = next(rank for rank, word in enumerate(words) if word != words[0])
    first, second = read(words[0]), read(words[other])
    if first == second:  # several tensors, of other sizes or types; or an earlier call was left out
        skipped = words[0] >> SEQUENCE != words[other] >> SEQUENCE
        second += ", after another number of collectives" if skipped else ", of other sizes"
    return CollectiveMismatch(
        f"the ranks of a group have called different collectives: rank 0 called {first}, and rank {other} called "
        f"{second}. {harm}. Call the same one, with tensors of the same type and size, on every rank."
    )
