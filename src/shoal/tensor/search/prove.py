"""Do cuts that a user asked for compute the same? Each rank's part is tried in turn, in one process.

Where ranks would add up what they have, the sum is taken from the uncut model: so each rank's part can run by itself,
and afterwards the parts must add up to that. A view that counts all heads, a cut through the middle of a head, a row
without a column: each shows as an error or a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.tensor.cut import Cut, Cuts
from shoal.tensor.layout import TensorLayout, cut
from shoal.tensor.projection import bias_of, project, weight_of
from shoal.tensor.search.trial_pass import Trace, undisturbed

Sums = dict[str, list[Tensor]]


def check_between(model: nn.Module, trace: Trace, cuts: list[Cut]) -> None:
    """Refuse what would go wrong unseen between columns and rows: learned data, random numbers, data that gets out."""
    rows = {one.module for one in cuts if one.how == "row"}
    names = {id(p): f"the parameter '{name}'" for name, p in model.named_parameters()}
    starts = [call for one in cuts if one.how == "column" for call in trace.calls(one.module)]
    queue = [tensor for call in starts for tensor in call.outputs]
    between = set(queue)
    events: set[int] = set()
    reasons: list[str] = []
    while queue:
        tensor = queue.pop()
        if tensor in trace.returned:
            reasons.append("what is between them is returned by the model")
        for number in trace.uses[tensor]:
            event = trace.events[number]
            if event.module is not None and event.module not in rows:
                reasons.append(f"what is between them goes into '{event.module}', which is no row")
            if event.module is None:
                events.add(number)
                fresh = set(event.outputs) - between
                between |= fresh
                queue += fresh
    for event in (trace.events[number] for number in sorted(events)):
        met = [
            names.get(other, "learned data")
            for other in event.inputs
            if other not in between and other in trace.learned
        ]
        if met:
            reasons.append(f"{met[0]} is used between them, and its gradient would be a part")
        if event.random:
            reasons.append("a dropout is between them")
    if reasons:
        parts = ", ".join(f"'{one.module}'" for one in cuts[:4])
        raise ConfigError(
            f"tensor_rules: {parts} cannot be cut: {reasons[0]}; change that, or take them out of the rules."
        )


def prove(model: nn.Module, run: Callable[[], object], cuts: list[Cut], degree: int) -> None:
    """Refuse columns and rows that do not fit together."""
    lines = [one for one in cuts if one.how in ("column", "row")]
    if not lines:
        return
    names = ", ".join(f"'{one.module}'" for one in lines[:4])
    true = _recorded(model, run, lines)
    sums: Sums = {name: [torch.zeros_like(value) for value in values] for name, values in true.items()}
    layout = Cuts(tuple(lines), degree=degree).layout()
    for rank in range(degree):
        try:
            _tried(model, run, lines, layout, rank, true, sums)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"tensor_rules: with {names} cut {degree} ways the model does not run ({reason}); "
                "shape data as (..., -1, size of a head), and let every column end in a row."
            ) from None
    for name, values in true.items():
        for value, found in zip(values, sums[name], strict=True):
            if not torch.allclose(found, value, rtol=_tolerance(value), atol=_tolerance(value)):
                raise ConfigError(
                    f"tensor_rules: with {names} cut {degree} ways, the parts of '{name}' do not add up to what it "
                    "gives whole; cut between heads, and let only columns feed a row."
                )


def _tolerance(value: Tensor) -> float:
    # Sums in another order differ by a few eps; a wrong cut by the size of the values.
    return math.sqrt(torch.finfo(value.dtype).eps) * max(1.0, float(value.abs().max()))


def _recorded(model: nn.Module, run: Callable[[], object], lines: list[Cut]) -> Sums:
    """What the rows give in the uncut model, call by call."""
    true: Sums = {one.module: [] for one in lines if one.how == "row"}
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for name, values in true.items():

            def keep(_: nn.Module, __: object, result: Tensor, values: list[Tensor] = values) -> None:
                values.append(result)

            stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        run()
    return true


def _tried(
    model: nn.Module,
    run: Callable[[], object],
    lines: list[Cut],
    layout: TensorLayout,
    rank: int,
    true: Sums,
    sums: Sums,
) -> None:
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for one in lines:
            module = model.get_submodule(one.module)
            stack.callback(module.__dict__.pop, "forward", None)
            weight = cut(f"{one.module}.weight", weight_of(module), layout, rank)
            if one.how == "column":
                bias = bias_of(module)
                part = None if bias is None else cut(f"{one.module}.bias", bias, layout, rank)
                module.forward = _column(module, weight, part)
            else:
                values = iter(zip(true[one.module], sums[one.module], strict=True))
                module.forward = _row(module, weight, rank, values)
        run()


def _column(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: project(module, x, weight, bias)


def _row(
    module: nn.Module, weight: Tensor, rank: int, values: Iterator[tuple[Tensor, Tensor]]
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        true, found = next(values)
        # The true output goes on, not the part: each row is judged by itself, and errors do not add up.
        found += project(module, x, weight, bias_of(module) if rank == 0 else None)
        return true

    return forward
