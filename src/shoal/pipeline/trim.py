"""Take from a model what this worker's stages do not need."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.pipeline.spine import Interception, restored, slots
from shoal.pipeline.stage import Stage, another_way, host
from shoal.torch_private import buffers_of, parameters_of


def trim(model: nn.Module, stages: Sequence[Stage], mine: Collection[int]) -> None:
    """Take from the model what none of my stages needs; the rest keeps its names.

    NaN that takes no memory and is no parameter is left in the place of another stage's weight. It does not follow
    `model.to(...)`, so trim last.

    >>> from shoal.pipeline.spine import observe
    >>> from shoal.pipeline.stage import plan_stages
    >>> model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    >>> trim(model, plan_stages(model, observe(model, torch.zeros(4, 3)), ["2"]), mine={1})
    >>> [name for name, _ in model.named_parameters()]
    ['2.weight', '2.bias']
    """
    called = {name for stage in stages for name in stage.modules}
    needed = {name for number in mine for name in stages[number].parameters}
    running = {name for number in mine for name in stages[number].modules}
    for name, module, key, tensor in list(slots(model)):
        if name in needed or (key in buffers_of(module) and host(name.rpartition(".")[0], called) in running):
            continue
        parameters_of(module).pop(key, None)
        buffers_of(module).pop(key, None)
        # If code outside of its stage reads it all the same, the result is NaN: seen at once, never a wrong number.
        empty = math.nan if tensor.is_floating_point() else 0
        module.__dict__[key] = torch.full((), empty, dtype=tensor.dtype, device=tensor.device).expand(
            tensor.shape
        )
    for name in called - running:
        refusal = partial(_refuse, f"'{name}' is called outside of its stage")
        Interception({model.get_submodule(name): refusal})


def _refuse(what: str, *_: object, **__: object) -> NoReturn:
    raise ConfigError(another_way(what))


def trimmed_away(model: nn.Module) -> str | None:
    """The name of a weight whose place `trim` has filled, in this run or in another; None where all are here."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and _is_filler(value):
                return f"{name}.{key}" if name else key
    return None


def _is_filler(tensor: torch.Tensor) -> bool:
    at_one_place = not any(tensor.stride()) and tensor.numel() > 0 and not tensor.is_meta
    return at_one_place and bool(tensor.flatten()[0].isnan())


@contextmanager
def trimmed(model: nn.Module, stages: Sequence[Stage], mine: Collection[int]) -> Iterator[None]:
    """The model as `trim` leaves it, for a while."""
    modules = list(model.modules())
    attributes = restored([module.__dict__ for module in modules])
    parameters = restored([parameters_of(module) for module in modules])
    buffers = restored([buffers_of(module) for module in modules])
    with attributes, parameters, buffers:
        trim(model, stages, mine)
        yield
