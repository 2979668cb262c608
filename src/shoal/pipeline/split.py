"""Where to cut a model into stages: between modules of its spine, so that the slowest stage is as fast as can be."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shoal.call import call_model
from shoal.errors import ConfigError
from shoal.pipeline.proof import DIFFERENT_PASSES, find_leak, record, refusal
from shoal.pipeline.spine import Calls, Interception, Spine, call_of, observe, slots, undisturbed
from shoal.pipeline.stage import Stage, plan_stages, stages_of_tensors
from shoal.table import did_you_mean
from shoal.torch_private import parameters_of

Activation = tuple[tuple[int, ...], torch.dtype]
"""What passes a boundary: its shape without the batch dimension, and its dtype."""
Together = Sequence[Collection[str]]
"""Groups of modules that no boundary may divide."""


@dataclass(frozen=True)
class Split:
    """A model cut into stages. It holds names and numbers, no tensors."""

    boundaries: tuple[str, ...]
    """The modules at whose inputs stages 1, 2, … begin."""
    stages: tuple[Stage, ...]
    """What each stage runs; for `StageModule` and `trim`."""
    owners: Mapping[str, int]
    """For each parameter and buffer the first stage that uses it: the one to ask for its value."""
    tied: tuple[tuple[tuple[int, str], ...], ...]
    """Weights that several stages have a copy of: groups of stage and name. Their gradients have to be added."""
    costs: tuple[float, ...]
    """Seconds of a forward pass in each stage, or what `costs=` gave."""
    activations: tuple[Activation, ...]
    """What passes each boundary."""
    parts: tuple[tuple[str, ...], ...]
    """The modules each stage is made of, for printing."""
    sizes: tuple[int, ...]
    """Elements of the parameters of each stage."""


def find_split(
    model: nn.Module,
    inputs: object,
    stages: int,
    named: Sequence[str] = (),
    costs: Sequence[float] | None = None,
    together: Together = (),
    speeds: Sequence[float] = (),
) -> Split:
    """Cut a model into stages of like cost, and prove on `inputs`, a real micro-batch, that they compute the same.

    `named` are the modules to choose boundaries from; without them they are found. `costs` are those of
    `span_costs`, measured elsewhere: with the same ones, every worker finds the same split. Modules of one group of
    `together` come into one stage. `speeds`, one for each stage, let faster ones have more.

    >>> model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
    >>> split = find_split(model, torch.zeros(4, 3), stages=2, costs=[1, 1, 1])
    >>> split.boundaries, split.activations
    (('2',), (((5,), torch.float32),))
    """
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        # It repeats calls of modules during backward, when the received activation is gone.
        raise ConfigError(
            "the model's own gradient checkpointing cannot run in stages; call model.gradient_checkpointing_disable() "
            "and use recompute='blocks'."
        )
    spine = observe(model, inputs)
    places = find_places(model, spine, named, together) if stages > 1 else ()
    spans = list(costs if costs is not None else _measure(model, inputs, places))
    truth = record(model, inputs, places)
    leak = None
    while len(places) >= stages - 1:
        cuts = choose_cuts(spans, stages, speeds)
        planned = plan_stages(model, spine, [places[cut - 1] for cut in cuts])
        leak = find_leak(model, inputs, planned, truth)
        if leak is None:
            # Proved: every stage alone, fed the true activation, gives the true one of the next, bit for bit.
            edges = [0, *cuts, len(spans)]
            return _describe_split(
                model, spine, planned, [sum(spans[a:b]) for a, b in itertools.pairwise(edges)]
            )
        if named:
            break
        # Something passes this boundary unseen (a global, a cached tensor): join the spans on its two sides, try again.
        at = places.index(leak.boundary)
        spans[at : at + 2] = [spans[at] + spans[at + 1]]
        places = places[:at] + places[at + 1 :]
    if leak is not None:
        raise refusal(leak) from leak.cause
    raise _too_few_places(stages, places)


def choose_cuts(costs: Sequence[float], stages: int, speeds: Sequence[float] = ()) -> tuple[int, ...]:
    """Where to cut a row of costs into this many stages, none empty, so that the largest time is as small as can be.

    A stage's time is the sum of its costs over its speed; without `speeds` all are alike. Gives the index of the first
    cost of each stage but the first. There are at least as many costs as stages.

    >>> choose_cuts([3, 1, 1, 1, 4, 2], 3), choose_cuts([1, 1, 1, 1, 1, 1], 2, speeds=[2, 1])
    ((3, 5), (4,))
    """
    rates = speeds or [1.0] * stages
    sums = [0.0, *itertools.accumulate(costs)]
    # Dynamic programming: most[k][i] is the largest time if the first i costs make k + 1 stages, cut[k][i] where the
    # last of these begins.
    most = [[total / rates[0] for total in sums]]
    cut: list[list[int]] = [[0] * len(sums)]
    for k in range(1, stages):
        row = [float("inf")] * len(sums)
        at = [0] * len(sums)
        for i in range(k + 1, len(sums)):
            at[i] = min(range(k, i), key=lambda j: max(most[k - 1][j], (sums[i] - sums[j]) / rates[k]))
            row[i] = max(most[k - 1][at[i]], (sums[i] - sums[at[i]]) / rates[k])
        most.append(row)
        cut.append(at)
    cuts: list[int] = []
    end = len(costs)
    for k in range(stages - 1, 0, -1):
        end = cut[k][end]
        cuts.insert(0, end)
    return tuple(cuts)


def _too_few_places(stages: int, places: Sequence[str]) -> ConfigError:
    remedy = f"use {len(places) + 1} stages, or name" if places else "name"
    return ConfigError(
        f"{stages} stages need {stages - 1} places to split the model at, and it has {len(places)} "
        f"({', '.join(places) or 'none'}); {remedy} modules that are called one after the other, with split=."
    )


def span_costs(
    model: nn.Module, inputs: object, named: Sequence[str] = (), together: Together = ()
) -> tuple[float, ...]:
    """Seconds of the forward pass before, between and after the places where the model may be split."""
    return _measure(model, inputs, find_places(model, observe(model, inputs), named, together))


def find_places(
    model: nn.Module, spine: Spine, named: Sequence[str] = (), together: Together = ()
) -> tuple[str, ...]:
    """The modules at whose input a stage may begin, in the order of the pass: those named, or those found.

    Found are modules with parameters, called once each with one floating-point tensor, after other parameters
    were used. Whether the model carries data around them is for the proof to say.

    >>> model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 2))
    >>> find_places(model, observe(model, torch.zeros(4, 3)))
    ('1.0', '2')
    """
    if named:
        for name in named:
            if _check_named(model, spine, name) and _divides(spine, name, together):
                raise ConfigError(
                    f"split= names '{name}', which lies between layers that tpN cuts together; split elsewhere, or "
                    "leave those layers whole with tensor_rules."
                )
            if _torn(spine, name) is not None:
                raise _tears(spine, name)
        return tuple(sorted(dict.fromkeys(named), key=lambda name: _check_named(model, spine, name)))
    weights = {name for name, module, key, _ in slots(model) if key in parameters_of(module)}
    first = min((uses[0] for name, uses in spine.uses.items() if name in weights), default=0)
    found = []
    for number in _chain(model, spine, 0):
        call = spine.calls[number]
        if number < first or call.fed is None or len(spine.numbers(call.module)) != 1:
            continue
        if next(model.get_submodule(call.module).parameters(), None) is not None:
            found.append(call)
    ready = tuple(call.module for call in found if call.fed is not None and call.fed[0][:1] == (spine.batch,))
    if found and not ready:
        _check_named(model, spine, found[0].module)
    whole = [name for name in ready if not _divides(spine, name, together)]
    kept = tuple(name for name in whole if _torn(spine, name) is None)
    if whole and not kept:
        raise _tears(spine, whole[0])
    return kept


def _torn(spine: Spine, name: str) -> str | None:
    """A buffer that forward passes change, and that is used on both sides of a boundary at this module."""
    at = spine.numbers(name)[0]
    spans = ((buffer, spine.uses[buffer]) for buffer in sorted(spine.changed))
    return next((buffer for buffer, uses in spans if uses[0] <= at < uses[-1]), None)


def _tears(spine: Spine, name: str) -> ConfigError:
    return ConfigError(
        f"the forward pass uses '{_torn(spine, name)}', a buffer that it changes, both before and after '{name}', and "
        "each stage of a pipeline would have its own; split elsewhere, at modules that split= names, or leave ppN out."
    )


def _divides(spine: Spine, name: str, together: Together) -> bool:
    """Whether a stage that begins at this module would have one part of a group before it and one after."""
    at = spine.numbers(name)[0]
    groups = [[number for module in group for number in spine.numbers(module)] for group in together]
    return any(min(calls) < at <= max(calls) for calls in groups if calls)


def _check_named(model: nn.Module, spine: Spine, name: str) -> int:
    """The number of the call that the name stands for, if a stage can begin there."""
    known = [n for n, _ in model.named_modules() if n]
    if name not in known:
        raise ConfigError(
            f"split= names '{name}', which is no module of the model{did_you_mean(name, known[:20])}"
        )
    numbers = spine.numbers(name)
    if len(numbers) != 1:
        raise ConfigError(
            f"split= names '{name}', which one pass calls {len(numbers)} times; name a module that is called once."
        )
    fed = spine.calls[numbers[0]].fed
    if fed is None:
        raise ConfigError(
            f"split= names '{name}', whose first argument is no floating-point tensor; name a module that is fed one."
        )
    if fed[0][:1] != (spine.batch,):
        raise ConfigError(
            f"'{name}' is fed a tensor of shape {fed[0]}, whose first dimension is not the {spine.batch} samples of "
            "the batch; let the model keep samples in the first dimension, as with batch_first=True."
        )
    return numbers[0]


def _chain(model: nn.Module, spine: Spine, number: int) -> Iterator[int]:
    """The calls a pass is made of, down to the level of blocks."""
    inner = spine.inside(number)
    kinds = [type(model.get_submodule(spine.calls[i].module)) for i in inner]
    for i, kind in zip(inner, kinds, strict=True):
        module = model.get_submodule(spine.calls[i].module)
        # One of several of a kind is a block. A lone module may be what blocks, its members, are held together by.
        lone = kinds.count(kind) == 1 and any(_is_list(part) for part in module.modules())
        if isinstance(module, nn.Sequential) or lone:
            yield from _chain(model, spine, i)
        else:
            yield i


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 1


def _measure(model: nn.Module, inputs: object, places: Sequence[str], passes: int = 3) -> tuple[float, ...]:
    """Seconds before, between and after the calls of these modules: medians of a few passes."""
    times: list[float] = []

    def _mark(made: Calls, *args: object, **kwargs: object) -> object:
        times.append(_now())
        return made(*args, **kwargs)

    # On one rank, for one micro-batch: ratios count, not seconds.
    modules = [model.get_submodule(name) for name in places]
    rows = []
    with undisturbed(model), Interception({module: partial(_mark, call_of(module)) for module in modules}):
        for _ in range(passes):
            times[:] = [_now()]
            call_model(model, inputs)
            times.append(_now())
            rows.append([after - before for before, after in itertools.pairwise(times)])
    if any(len(row) != len(rows[0]) for row in rows):  # it has not called the same modules each time
        raise ConfigError(DIFFERENT_PASSES)
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def _now() -> float:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def _describe_split(
    model: nn.Module, spine: Spine, stages: tuple[Stage, ...], costs: Sequence[float]
) -> Split:
    """The facts about a split that others ask for."""
    boundaries = tuple(stage.begin for stage in stages if stage.begin is not None)
    starts = [spine.numbers(name)[0] for name in boundaries]
    used = stages_of_tensors(model, spine, boundaries)
    weights = {name: tensor for name, module, key, tensor in slots(model) if key in parameters_of(module)}
    parts: list[list[str]] = [[] for _ in stages]
    for number in _chain(model, spine, 0):
        name = spine.calls[number].module
        if next(model.get_submodule(name).parameters(), None) is not None:
            parts[sum(start <= number for start in starts)].append(name)
    fed = [spine.calls[start].fed for start in starts]
    return Split(
        boundaries=boundaries,
        stages=stages,
        owners={name: numbers[0] for name, numbers in used.items()},
        tied=_tied(weights, stages),
        costs=tuple(costs),
        activations=tuple((what[0][1:], what[1]) for what in fed if what is not None),
        parts=tuple(tuple(dict.fromkeys(names)) for names in parts),
        sizes=tuple(
            sum({weights[n]: weights[n].numel() for n in stage.parameters}.values()) for stage in stages
        ),
    )


def _tied(
    weights: Mapping[str, torch.Tensor], stages: Sequence[Stage]
) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Weights with copies in several stages. Two names of one weight in one stage are one copy, under the first."""
    groups: dict[torch.Tensor, dict[int, str]] = {}
    for stage in stages:
        for name in stage.parameters:
            groups.setdefault(weights[name], {}).setdefault(stage.number, name)
    return tuple(tuple(sorted(copies.items())) for copies in groups.values() if len(copies) > 1)


def describe_split(split: Split) -> str:
    """The split as a table for people.

    >>> model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
    >>> print(describe_split(find_split(model, torch.zeros(4, 3), stages=2, costs=[1, 1, 1])))
    stage  modules  parameters  share of cost
        0  0                20           33 %
        1  2 to 4           42           67 %
    """
    ends = [f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names) for names in split.parts]
    wide = max(len("modules"), *map(len, ends))
    total = sum(split.costs) or 1.0
    lines = [f"stage  {'modules':<{wide}}  parameters  share of cost"]
    for number, (text, size, cost) in enumerate(zip(ends, split.sizes, split.costs, strict=True)):
        lines.append(f"{number:>5}  {text:<{wide}}  {size:>10,}  {cost / total:>12.0%}".replace("%", " %"))
    return "\n".join(lines)
