"""The forms in which c10d's methods may be called: with an options struct, as torch does, or short, as people do.

    group.allreduce([tensor], options)   group.allreduce([tensor])   group.allreduce(tensor, ReduceOp.MAX)
    group.broadcast(tensor, root=1)      group.barrier(timeout=timedelta(seconds=5))

C++ groups have them by overloading. Here a decorator brings each short form into the long one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch import Tensor, is_inference_mode_enabled
from torch.distributed import ReduceOp, Work

from shoal.torch_private import c10d


@dataclass
class Options:
    """What a short form says, under the names of torch's structs."""

    reduceOp: ReduceOp
    rootRank: int = 0
    timeout: timedelta | None = None
    asyncOp: bool = True


_STRUCTS = frozenset(
    {
        Options,
        c10d.AllgatherOptions,
        c10d.AllreduceCoalescedOptions,
        c10d.AllreduceOptions,
        c10d.AllToAllOptions,
        c10d.BarrierOptions,
        c10d.BroadcastOptions,
        c10d.GatherOptions,
        c10d.ReduceOptions,
        c10d.ReduceScatterOptions,
        c10d.ScatterOptions,
    }
)
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def collective(
    tensors: int, *short: str, wrapped: Sequence[int] = ()
) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """For a method of `tensors` arguments, then options; `short`: what may stand in the place of these.

    `wrapped` names the arguments that a short form gives without the list around them. A call that fails before
    it has begun is told to the other ranks before it is raised.
    """

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        @wraps(method)
        def _call(group: Any, *args: Any, **named: Any) -> Work:
            if is_inference_mode_enabled():
                # What is made here is used again outside, and by other threads, which are not in that mode.
                with torch.inference_mode(mode=False):
                    return _call(group, *args, **named)
            try:
                if len(args) == tensors + 1 and args[tensors].__class__ in _STRUCTS:
                    return method(group, *args)
                return method(group, *_long(tensors, short, wrapped, args, named))
            except Exception as error:
                # Lists of other lengths, a tensor of another kind, an unknown option: whatever it was, peers may wait.
                if group.under_way != id(error):
                    group.announce_refusal()
                group.under_way = 0
                raise

        return _call

    return decorate


def _long(
    tensors: int, short: Sequence[str], wrapped: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]
) -> list[object]:
    named = dict(named)
    options = named.pop("opts", None)
    given = list(args[:tensors])
    rest = args[tensors:]
    if rest and rest[0].__class__ in _STRUCTS:
        options, rest = rest[0], rest[1:]
    if wrapped and any(isinstance(given[place], Tensor) for place in wrapped):
        given = [[argument] for argument in given]
    if options is None:
        values = dict(zip(short, rest, strict=False)) | named
        options = Options(ReduceOp(ReduceOp.SUM))
        for name, value in values.items():
            if name not in short:
                raise TypeError(f"a collective of the shoal backend takes {', '.join(short)}; not {name}")
            bare = name == "op" and not hasattr(value, "op")  # ReduceOp.SUM itself is only the kind of one
            setattr(options, _FIELDS[name], ReduceOp(value) if bare else value)
    return [*given, options]
