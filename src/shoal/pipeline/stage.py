"""One stage of a model: the model's own forward, entered at one module and left at another.

A stage runs the forward of the whole model on the batch's inputs, so masks, positions and rotary tables come
about where they are needed. What lies before the stage does no work: NaN of the right shape takes the place of
what modules with parameters give, and of parameters that other stages own. At the module where the stage
begins, the received activation takes the place of the argument; the call at which it ends hands its argument
out. NaN and not zero: what reaches a stage by another way than the received activation must not go unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from shoal.call import call_model
from shoal.errors import ConfigError
from shoal.pipeline.spine import (
    Calls,
    Echo,
    Interception,
    Spine,
    activation,
    call_of,
    copied_buffers,
    first_tensor,
    leading,
    slots,
)
from shoal.torch_private import parameters_of, tree_map


@dataclass(frozen=True)
class Stage:
    """What one stage runs and needs. Names are those of the whole model."""

    number: int
    begin: str | None
    """The module at whose input it begins; None for the first stage."""
    end: str | None
    """The module at whose input it ends; None for the last stage."""
    modules: frozenset[str]
    """The modules that may run in it."""
    parameters: tuple[str, ...]
    """The parameters it uses, each under the name by which it is reached here."""
    stand_ins: Mapping[str, Echo]
    """Modules before `begin` that do not run: NaN takes the place of their output."""
    kept: tuple[str, ...]
    """Modules before `begin` that must run to tell the shape of their output; NaN then takes its place."""
    again: tuple[str, ...]
    """Modules without parameters before `begin`, such as rotary tables: they run in each stage that needs them."""


def plan_stages(model: nn.Module, spine: Spine, boundaries: Sequence[str]) -> tuple[Stage, ...]:
    """The stages between boundaries, which the pass calls once each and in this order.

    >>> from shoal.pipeline.spine import observe
    >>> model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    >>> [stage.parameters for stage in plan_stages(model, observe(model, torch.zeros(4, 3)), ["2"])]
    [('0.weight', '0.bias'), ('2.weight', '2.bias')]
    """
    starts = [spine.numbers(name)[0] for name in boundaries]
    used = stages_of_tensors(model, spine, boundaries)
    weights = {name for name, module, key, _ in slots(model) if key in parameters_of(module)}
    stages = []
    for number in range(len(boundaries) + 1):
        begin = boundaries[number - 1] if number else None
        end = boundaries[number] if number < len(boundaries) else None
        running = {call.module for i, call in enumerate(spine.calls) if number in _span(spine, starts, i)}
        stand_ins: dict[str, Echo] = {}
        # Whether NaN takes its place: another stage has its parameters, or its state.
        kept: dict[str, bool] = {}
        for name, numbers in _before(spine, starts[number - 1]).items() if number else ():
            # One rule for the shape of its output in every call, or the module has to run to tell it.
            echo, *others = {spine.calls[i].echo for i in numbers}
            trained = next(model.get_submodule(name).parameters(), None) is not None
            trained = trained or any(buffer.startswith(f"{name}.") for buffer in spine.changed)
            if trained and echo is not None and not others:
                stand_ins[name] = echo
            else:
                kept[name] = trained
                running |= {call.module for i in numbers for call in spine.calls[i : spine.calls[i].stop]}
        parameters = tuple(name for name in used if name in weights and number in used[name])
        again = tuple(name for name in kept if not kept[name])
        whole = tuple(name for name in kept if kept[name])
        stages.append(Stage(number, begin, end, frozenset(running), parameters, stand_ins, whole, again))
    return tuple(stages)


def stages_of_tensors(
    model: nn.Module, spine: Spine, boundaries: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """For each parameter and buffer the stages that use it.

    One that the pass did not use may be used by another batch, wherever its module is called: that module's
    stages get it, or those of the module it is part of.
    """
    starts = [spine.numbers(name)[0] for name in boundaries]
    called = {call.module for call in spine.calls}
    found: dict[str, tuple[int, ...]] = {}
    for name, *_ in slots(model):
        stages = {sum(start < use for start in starts) for use in spine.uses.get(name, ())}
        if not stages:
            for number in spine.numbers(host(name.rpartition(".")[0], called)):
                stages |= set(_span(spine, starts, number))
        found[name] = tuple(sorted(stages))
    return found


def host(module: str, called: Collection[str]) -> str:
    """The module itself, or the nearest one around it that the pass called."""
    while module not in called:
        module = module.rpartition(".")[0]
    return module


def _span(spine: Spine, starts: Sequence[int], number: int) -> range:
    """The stages in which a call is under way."""
    first = sum(start <= number for start in starts)
    last = sum(start < spine.calls[number].stop for start in starts)
    return range(first, last + 1)


def _before(spine: Spine, begin: int) -> dict[str, list[int]]:
    """The calls that have ended when `begin` begins and were not part of another such call, by module."""
    found: dict[str, list[int]] = {}
    for outer in spine.around(begin):
        for number in spine.inside(outer):
            if spine.calls[number].stop <= begin:
                found.setdefault(spine.calls[number].module, []).append(number)
    return found


class StageModule(nn.Module):
    """A stage that can be called: with the received activation (None for the first stage) and the inputs.

    Gives the activation for the next stage; the last one gives the model's output. The model may be whole or
    trimmed, and several stages may share it. `on_begin` is called when the stage's own work begins: the place
    to set the state of random generators, if they are to continue where the stage before stopped.

    >>> model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    >>> x = torch.ones(4, 3)
    >>> from shoal.pipeline.spine import observe
    >>> first, second = (StageModule(model, s) for s in plan_stages(model, observe(model, x), ["2"]))
    >>> torch.equal(second(first(None, x), x), model(x))
    True
    """

    def __init__(self, model: nn.Module, stage: Stage, on_begin: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.model = model
        self.stage = stage
        self.on_begin = on_begin

    def forward(self, received: Tensor | None, inputs: object) -> object:
        """Run the stage."""
        run = _Run(self, received)
        # What runs before the stage's own work gives NaN or shapes only: no graph is kept of it.
        with torch.set_grad_enabled(run.grad and run.begun), run.before, Interception(run.ends()):
            if run.begun and self.on_begin is not None:
                self.on_begin()
            try:
                output = call_model(self.model, inputs)
                left = False
            except _StageLeft as reached:
                output = reached.value
                left = True
        if not run.begun or left != (self.stage.end is not None) or output is None:
            missed = self.stage.end if run.begun else self.stage.begin
            raise ConfigError(another_way(f"stage {self.stage.number} does not come to '{missed}'"))
        return output


class _StageLeft(BaseException):
    """Carries the activation out of the model; not an Exception, so that no model catches it by chance."""

    def __init__(self, value: Tensor | None) -> None:
        super().__init__()
        self.value = value


class _Run:
    """One pass of a stage: what calls of modules turn into."""

    def __init__(self, owner: StageModule, received: Tensor | None) -> None:
        self.owner = owner
        self.received = received
        self.grad = torch.is_grad_enabled()
        self.begun = owner.stage.begin is None
        self.junk: Tensor | None = None
        self.before = Interception(self._stand_ins())

    def _stand_ins(self) -> dict[nn.Module, Calls]:
        stage = self.owner.stage
        find = self.owner.model.get_submodule
        functions: dict[nn.Module, Calls] = {
            find(name): partial(self._stand_in, name, echo) for name, echo in stage.stand_ins.items()
        }
        for name in stage.kept + stage.again:
            module = find(name)
            functions[module] = partial(self._keep, module, call_of(module), name in stage.kept)
        return functions

    def ends(self) -> dict[nn.Module, Calls]:
        stage = self.owner.stage
        functions = dict[nn.Module, Calls]()
        if stage.begin is not None:
            module = self.owner.model.get_submodule(stage.begin)
            functions[module] = partial(self._begin, module, call_of(module))
        if stage.end is not None:
            module = self.owner.model.get_submodule(stage.end)
            functions[module] = partial(self._end, module)
        return functions

    def _begin(self, module: nn.Module, made: Calls, *args: object, **kwargs: object) -> object:
        """The call at which the stage begins; a later one of the same module is an ordinary call."""
        place = leading(module, args, kwargs)
        if self.begun or place is None:
            return made(*args, **kwargs)
        self.begun = True
        # From here on every module runs for real, also one that stood in before the boundary.
        self.before.remove()
        torch.set_grad_enabled(self.grad)
        if self.owner.on_begin is not None:
            self.owner.on_begin()
        received = self.received
        self.received = None  # the graph holds what is needed of it
        if isinstance(place, str):
            return made(*args, **{**kwargs, place: received})
        return made(received, *args[1:], **kwargs)

    def _end(self, module: nn.Module, *args: object, **kwargs: object) -> NoReturn:
        """The call that does not happen any more."""
        raise _StageLeft(activation(module, args, kwargs) if self.begun else None)

    def _stand_in(self, name: str, echo: Echo, *args: object, **kwargs: object) -> object:
        """NaN in the shape of the module's output; what was made for the last module is handed on if it fits."""
        first = first_tensor(args, kwargs)
        if first is None:
            raise ConfigError(another_way(f"'{name}' is called without a tensor"))
        shape = echo.shape(first)
        if first is not self.junk or first.shape != shape or first.dtype != echo.dtype:
            self.junk = first.new_full(shape, math.nan, dtype=echo.dtype)
        return self.junk if echo.rest is None else (self.junk, *echo.rest)

    def _keep(self, module: nn.Module, made: Calls, trained: bool, *args: object, **kwargs: object) -> object:
        """A call that only looks: buffers, which another stage on this model may own, stay as they are."""
        with copied_buffers(module):
            output = made(*args, **kwargs)
        return tree_map(poisoned, output) if trained else output


def poisoned(leaf: object) -> object:
    """NaN in the place of a floating-point tensor; other leaves as they are."""
    return torch.full_like(leaf, math.nan) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def another_way(what: str) -> str:
    """The sentence for a batch on which the model calls other modules than it did in the trial pass."""
    return (
        f"this batch takes another way through the model than the trial pass: {what}; "
        "split at modules that every batch passes, with split= naming them. If this was run.module between two steps: "
        "no rank has all of the model, use run.evaluate."
    )
