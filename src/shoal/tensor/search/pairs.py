"""Projections around element-wise functions: the first can be cut by outputs, the second by inputs.

Each value between them depends on one output of the first, so that a rank that computes some outputs of the first
can go on with them alone; the second adds up what all ranks found. Several first ones (a gate beside them) are fine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from shoal.tensor.projection import inputs, is_projection, outputs, weight_of
from shoal.tensor.search.trial_pass import Event, Trace


@dataclass(frozen=True)
class Pair:
    """`columns` feed `row` through functions of single values; `dropped` if a dropout lies between."""

    columns: tuple[str, ...]
    row: str
    size: int
    weight: int
    dropped: bool


class _No(Exception):
    """Why something is not a pair."""


@dataclass
class _PairSearch:
    trace: Trace
    modules: Mapping[str, nn.Module]
    size: int
    parameters: Mapping[int, str]
    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    cut: set[int] = field(default_factory=set)
    queue: list[int] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    dropped: bool = False

    def column(self, name: str) -> None:
        """Take a projection among those that are cut by outputs, with all that comes out of it."""
        if name in self.columns:
            return
        if outputs(self.modules[name]) != self.size:
            raise _No("its output meets one of another size")
        self.columns.append(name)
        for call in self.trace.calls(name):
            self.take(call.outputs)

    def take(self, tensors: Iterable[int]) -> None:
        for tensor in tensors:
            if tensor not in self.cut:
                self.cut.add(tensor)
                self.queue.append(tensor)

    def follow(self) -> None:
        while self.queue:
            tensor = self.queue.pop()
            if tensor in self.trace.returned:
                raise _No("its output is what the model returns")
            for number in self.trace.uses[tensor]:
                self.step(number, tensor)

    def step(self, number: int, tensor: int) -> None:
        event = self.trace.events[number]
        if event.module is not None:
            if not is_projection(self.modules[event.module]) or event.inputs != (tensor,):
                raise _No(f"its output goes into '{event.module}', which is no projection")
            if event.module not in self.rows:
                self.rows.append(event.module)
            return
        if number in self.steps:
            return
        self.steps.add(number)
        # bernoulli_ is dropout, whose mask is drawn for the whole and cut (draws.py).
        if event.random and event.name != "bernoulli_":
            raise _No(f"its output goes into the operation {event.name}, which draws random numbers")
        if not event.elementwise:
            raise _No(f"its output goes into the operation {event.name}, which is not element-wise")
        self.dropped |= event.random
        for other in event.inputs:
            self.meet(other)
        if any(self.width(made) != self.size for made in event.outputs):
            raise _No(f"the operation {event.name} changes its size")
        self.take(event.outputs)

    def meet(self, other: int) -> None:
        """Another operand of an operation on cut data: cut as well, or the same for all of them and not learned."""
        if other in self.cut:
            return
        # Broadcast over the cut dimension, so every part meets the same. A learned one would get only a part of its
        # gradient.
        if self.width(other) == 1 and other not in self.trace.learned:
            return
        number = self.trace.source.get(other)
        made = None if number is None else self.trace.events[number]
        if number is None or made is None or self.width(other) != self.size or _starts(made):
            raise _No(f"its output meets {self.parameters.get(other, 'other data')}, which is not cut")
        if made.module is not None:
            if not is_projection(self.modules[made.module]):
                raise _No(f"its output meets that of '{made.module}'")
            self.column(made.module)
        else:
            self.step(number, other)

    def width(self, tensor: int) -> int:
        shape = self.trace.tensors[tensor].shape
        return shape[-1] if shape else 1

    def result(self) -> Pair:
        if len(self.rows) != 1:
            raise _No(f"its output goes into {len(self.rows)} projections, not into one")
        row = self.rows[0]
        if row in self.columns:
            raise _No("its output comes back to itself")
        if any(call.inputs[0] not in self.cut for call in self.trace.calls(row)):
            raise _No(f"'{row}' has other inputs too")
        names = [*self.columns, row]
        weight = sum(weight_of(self.modules[name]).numel() for name in names)
        return Pair(tuple(sorted(self.columns)), row, inputs(self.modules[row]), weight, self.dropped)


def _starts(event: Event) -> bool:
    """Is this an operation whose result cannot be traced back value by value?"""
    return event.module is None and (not event.elementwise or not event.inputs)


def find_pairs(
    model: nn.Module,
    trace: Trace,
    degree: int,
    refuse: Callable[[str], str | None],
) -> tuple[list[Pair], dict[str, str]]:
    """Pairs that do not overlap, large ones first, and for each projection that found no partner the reason.

    `refuse` says why a projection may not be cut at all, or None.
    """
    modules = dict(model.named_modules())
    parameters = {id(p): f"the parameter '{name}'" for name, p in model.named_parameters()}
    found: dict[tuple[tuple[str, ...], str], Pair] = {}
    reasons: dict[str, str] = {}
    for name, module in modules.items():
        if not is_projection(module) or refuse(name) is not None:
            continue
        search = _PairSearch(trace, modules, outputs(module), parameters)
        try:
            search.column(name)
            search.follow()
            pair = search.result()
            _check(pair, degree, refuse)
        except _No as no:
            reasons[name] = str(no)
        else:
            found[pair.columns, pair.row] = pair
    taken: dict[str, str] = {}
    chosen = []
    # Greedy by size, with the name as tie-break: all ranks must choose alike.
    for pair in sorted(found.values(), key=lambda pair: (-pair.weight, pair.row)):
        members = (*pair.columns, pair.row)
        busy = [taken[name] for name in members if name in taken]
        if busy:
            reasons.update(dict.fromkeys(members, f"the larger pair around '{busy[0]}' has its partner"))
            continue
        taken.update(dict.fromkeys(members, pair.row))
        chosen.append(pair)
    return chosen, {name: reason for name, reason in reasons.items() if name not in taken}


def _check(pair: Pair, degree: int, refuse: Callable[[str], str | None]) -> None:
    for name in (*pair.columns, pair.row):
        reason = refuse(name)
        if reason is not None:
            raise _No(f"its partner would be '{name}': {reason}")
    # Parts are rounded up, so the last worker could be left with none.
    if -(-pair.size // degree) * (degree - 1) >= pair.size:
        raise _No(f"{pair.size} values between it and '{pair.row}' are too few for {degree} workers")
