"""Functions of a script: what they read of the globals around them, and copies that may be called without a trace."""

from __future__ import annotations

import collections
import copy
import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def globals_read(code: types.CodeType) -> Iterator[str]:
    """Every global that a piece of code looks up."""
    yield from (str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from globals_read(constant)


class Copy:
    """A loss that may be called without a trace: what it counts, appends to or changes in place is a copy.

    A function gets globals and closure of its own, in which plain containers, tensors and objects of the script's
    classes are copies; so do the script's functions that it calls. The model and parameters stay, and so does all that
    is no part of the script, such as classes and a run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._memo: dict[int, object] = {id(one): one for one in (*model.modules(), *model.parameters())}
        self._globals: dict[int, dict[str, object]] = {}

    def of(self, value: object) -> Any:
        """The copy of a value that a function can see; raises what copying it raises."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, types.FunctionType):
            return value if _is_library(value.__module__) else self._function(value)
        if isinstance(value, functools.partial):
            keywords = {name: self.of(one) for name, one in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, nn.Module):
            self._memo |= {id(p): p for p in value.parameters()}
        elif not isinstance(value, _CONTAINERS) and (
            isinstance(value, type) or _is_library(type(value).__module__)
        ):
            return value
        return copy.deepcopy(value, self._memo)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        known = function.__globals__
        around = self._globals.setdefault(id(known), dict(known))
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(function.__code__, around, function.__name__, None, cells or None)
        self._memo[id(function)] = made  # before what is around it, which may lead back
        for name in globals_read(function.__code__):
            if name in known and around[name] is known[name]:
                around[name] = self.of(known[name])
        for cell, held in zip(cells, function.__closure__ or (), strict=True):
            if held != types.CellType():
                cell.cell_contents = self.of(held.cell_contents)
        made.__defaults__ = function.__defaults__ and tuple(map(self.of, function.__defaults__))
        named = function.__kwdefaults__
        made.__kwdefaults__ = named and {name: self.of(one) for name, one in named.items()}
        made.__dict__.update({name: self.of(one) for name, one in vars(function).items()})
        return made


def copy_of(function: Any, model: nn.Module) -> Any:
    """A copy of a loss that leaves no trace, as `Copy` says; the loss itself where it cannot be copied."""
    try:
        return Copy(model).of(function)
    except Exception:  # what it holds may say anything when it is copied
        return function


def numbers_kept(value: object) -> dict[str, float]:
    """Numbers that a function or an object of a script keeps from call to call: globals, closure, attributes.

    >>> kept = {"calls": 1}
    >>> numbers_kept([kept, "text"])
    {"[0]['calls']": 1}
    """
    return dict(_numbers("", value, set()))


def _numbers(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, float]]:
    if type(value) in (int, float):
        yield name, value
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    inside: dict[str, object] = {}
    if isinstance(value, types.FunctionType) and not _is_library(value.__module__):
        known = value.__globals__
        inside = {one: known[one] for one in globals_read(value.__code__) if one in known}
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():
                inside[free] = cell.cell_contents
        inside |= vars(value)
    elif isinstance(value, functools.partial):
        inside = {"": value.func, **value.keywords}
    elif isinstance(value, types.MethodType):
        inside = {"": value.__self__}
    elif type(value) in (list, dict) and len(value) <= _FEW:
        inside = {
            f"{name}[{key!r}]": one
            for key, one in (value.items() if type(value) is dict else enumerate(value))
        }
    elif not _is_library(type(value).__module__) and hasattr(value, "__dict__"):
        inside = vars(value)
    for key, one in inside.items():
        yield from _numbers(key or name, one, seen)


_FEW = 16
"""A container of more is data, and no place for a count."""

_CONTAINERS = (list, dict, set, bytearray, collections.deque, torch.Tensor)


def _is_library(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in ("torch", "numpy", "shoal", *sys.stdlib_module_names)
