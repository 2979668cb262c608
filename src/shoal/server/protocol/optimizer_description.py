"""An optimizer as a plain value, and the same optimizer again where that value arrives.

A server runs no code that came over the wire: it gets a name, which it looks up among torch's own optimizers, and
numbers. So an optimizer that is not one of these is refused on the worker, before anything has been trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import torch
from torch import nn, optim

from shoal.errors import ConfigError
from shoal.optimizer import ELEMENTWISE, additions, move_optimizer
from shoal.server.protocol.state_machine import Refused
from shoal.table import Table

KINDS: Table[type[optim.Optimizer]] = Table("optimizer", {kind.__name__: kind for kind in ELEMENTWISE})
_FIRST = "initial_accumulator_value"
_FOR_CARDS = "capturable"
"""Lets a worker record its steps on a card, and is refused by torch on a CPU, where servers run."""


Settings = dict[str, object]
"""The settings of one group: numbers, flags, None, and lists of numbers."""


class OptimizerDescription(TypedDict):
    """An optimizer of torch as it travels."""

    kind: str
    """The name of its class."""
    groups: list[Settings]


def describe(optimizer: optim.Optimizer) -> OptimizerDescription:
    """What `optimizer_from` needs, or a ConfigError if servers cannot run this optimizer.

    >>> describe(optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5))["kind"]
    'SGD'
    """
    kind = type(optimizer)
    if KINDS.get(kind.__name__) is not kind:
        raise ConfigError(
            f"servers run torch's own optimizers that treat each element alone, and {kind.__module__}.{kind.__name__} "
            f"is not one of them; use {', '.join(KINDS)}, or an exchange whose workers update, such as ddp."
        )
    if added := additions(optimizer):
        raise ConfigError(f"servers make the optimizer anew, and {kind.__name__} has {added}; use ddp.")
    return {"kind": kind.__name__, "groups": settings_of(optimizer)}


def settings_of(optimizer: optim.Optimizer) -> list[Settings]:
    """The settings of each group as plain values. What users add to a group for themselves stays with them."""
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: _plain(optimizer, index, key, group[key]) for key in optimizer.defaults}
        if _FIRST in settings:  # Adagrad reads this from its constructor, whatever its groups say
            settings[_FIRST] = float(optimizer.defaults[_FIRST])
        groups.append(settings)
    return groups


def _plain(optimizer: optim.Optimizer, index: int, key: str, value: object) -> object:
    if isinstance(value, list | tuple) and all(_is_number(v) for v in value):
        return list(value)
    if value is None or isinstance(value, bool) or _is_number(value):
        return value
    what = "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ConfigError(
        f"{type(optimizer).__name__}'s {key} of group {index} is {what}, which servers do not take; give a number."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def optimizer_from(
    description: OptimizerDescription, tensors: Sequence[Sequence[torch.Tensor]]
) -> optim.Optimizer:
    """The described optimizer over these tensors, one list a group. Runs as the exchanges run it: fused if it can.

    Raises ConfigError for a name that is no optimizer's, and Refused for what only a faulty sender would say.
    """
    kind = KINDS.look_up(str(description["kind"]))
    make: Callable[..., optim.Optimizer] = kind  # their base class has another constructor
    groups: list[Settings] = [dict(group) for group in description["groups"]]
    if len(groups) != len(tensors) or not groups:
        raise Refused(
            f"the optimizer has {len(groups)} groups and the tensors {len(tensors)}; give one list of tensors a group."
        )
    first = {_FIRST: groups[0][_FIRST]} if _FIRST in groups[0] and kind is optim.Adagrad else {}
    probe = nn.Parameter(torch.zeros(1))
    known = set(make([probe], **first).defaults)
    for index, group in enumerate(groups):
        check_settings(group, known, f"{kind.__name__}, group {index}")
    shells = [
        {
            **{key: as_setting(value) for key, value in group.items() if key != _FOR_CARDS},
            "params": [nn.Parameter(torch.zeros(1))],
        }
        for group in groups
    ]
    made = make(shells, **first)
    names = [[str(index)] for index in range(len(groups))]
    return move_optimizer(made, names, {str(index): list(own) for index, own in enumerate(tensors)})


def check_settings(settings: Mapping[str, object], known: set[str], whose: str) -> None:
    """Refuse what an optimizer of torch would not have said itself."""
    for key, value in settings.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if key not in known:
            raise Refused(f"{whose} has no setting '{key}'; it has {', '.join(sorted(known))}.")
        if not all(v is None or isinstance(v, bool | int | float) for v in numbers):
            raise Refused(f"{whose}: {key}={value!r} is not a number; give one, or a list of them.")


def as_setting(value: object) -> object:
    """A plain value as torch's optimizers keep it: betas are a tuple."""
    return tuple(value) if isinstance(value, list) else value
