"""Functions and classes of a program that cannot be imported, as bytes for a process of its own, and back.

What a notebook's cell or a script's `__main__` defines is in no module that a worker could import. So its code is sent,
with those of its globals that the code names; everything else is pickled by name as usual. The bytes go from a program
to processes that it has started itself, through a file in a folder that is private to the user: whoever could change
them could as well change the program. Nothing that came over a network is ever read here.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import importlib
import io
import linecache
import marshal
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shoal.errors import ConfigError

MAIN = "__main__"
_LOOKS_UP = ("LOAD_GLOBAL", "LOAD_NAME")
_NOT_COPIED = ("__dict__", "__weakref__", "_abc_impl")
_EMPTY = types.CellType()


def to_bytes(value: object, what: str) -> bytes:
    """`value` as bytes, with the functions, classes and globals of this program that it needs.

    >>> from_bytes(to_bytes((lambda x: x + 1, [2]), "a function"))[0](1)
    2
    """
    try:
        return _dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what} cannot be given to another process ({error}); make what it needs inside the function."
        ) from error


def _dumps(value: object) -> bytes:
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5)
    pickler.dump(value)
    return marshal.dumps((pickler.sources, stream.getvalue()))


def from_bytes(data: bytes) -> Any:
    """The value that `to_bytes` was given. Functions of `__main__` get the globals of this process's `__main__`."""
    sources, value = marshal.loads(data)
    for name, lines in sources.items():  # so that a traceback shows the lines of a cell
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return pickle.loads(value)


class _Pickler(pickle.Pickler):
    """Pickles by value the functions and classes that no other process could import."""

    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.sources: dict[str, list[str]] = {}
        """The source lines of code that is in no file, by the name that tracebacks show."""

    def reducer_override(self, value: object) -> Any:
        special = _REDUCERS.get(type(value))
        if special is not None:
            return special(value)
        if isinstance(value, types.FunctionType) and not _is_importable(value):
            self._note_source(value.__code__)
            return _reduce_function(value)
        if isinstance(value, type) and not _is_importable(value):
            return _reduce_class(value)
        return NotImplemented

    def _note_source(self, code: types.CodeType) -> None:
        name = code.co_filename
        if name not in self.sources and not os.path.exists(name):
            self.sources[name] = linecache.getlines(name)


def _is_importable(value: Any) -> bool:
    """Whether another process would import the same object by its name."""
    name = value.__module__
    if name == MAIN:
        return False
    found: Any = sys.modules.get(name)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _reduce_function(function: types.FunctionType) -> Any:
    module = function.__globals__.get("__name__", MAIN)
    named: dict[str, Any] = {}
    if module == MAIN:  # the globals of any other module come with it
        found = function.__globals__
        named = {name: found[name] for name in sorted(set(_names(function.__code__))) if name in found}
    state = (
        named,
        function.__defaults__,
        function.__kwdefaults__,
        function.__annotations__,
        function.__qualname__,
        function.__module__,
        function.__doc__,
        function.__dict__,
    )
    made = (marshal.dumps(function.__code__), module, function.__name__, function.__closure__)
    return _make_function, made, state, None, None, _fill_function


def _names(code: types.CodeType) -> Iterator[str]:
    """Every global that a code object looks up, also within the functions and classes that it defines."""
    yield from (str(i.argval) for i in dis.get_instructions(code) if i.opname in _LOOKS_UP)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _make_function(
    code: bytes, module: str, name: str, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    around = vars(sys.modules[MAIN] if module == MAIN else importlib.import_module(module))
    return types.FunctionType(marshal.loads(code), around, name, None, closure)


def _fill_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    named, function.__defaults__, function.__kwdefaults__, function.__annotations__ = state[:4]
    function.__qualname__, function.__module__, function.__doc__ = state[4:7]
    function.__dict__.update(state[7])
    function.__globals__.update(named)


def _reduce_cell(cell: types.CellType) -> Any:
    empty = cell == _EMPTY
    return _make_cell, (), None if empty else (cell.cell_contents,), None, None, _fill_cell


def _make_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, contents: tuple[object]) -> None:
    cell.cell_contents = contents[0]


def _reduce_class(made: type) -> Any:
    kind = type(made)
    if kind.__module__ == "enum":
        members = {name: member.value for name, member in made.__members__.items()}  # type: ignore[attr-defined]
        return _make_enum, (made.__bases__[-1], made.__name__, members, made.__module__, made.__qualname__)
    slots = vars(made).get("__slots__", ())
    names = {slots} if isinstance(slots, str) else set(slots)
    own = {k: v for k, v in vars(made).items() if k not in _NOT_COPIED and k not in names}
    first = {k: own.pop(k) for k in ("__slots__", "__module__", "__qualname__") if k in own}
    return _make_class, (kind, made.__name__, made.__bases__, first), own, None, None, _fill_class


def _make_class(kind: type, name: str, bases: tuple[type, ...], first: dict[str, Any]) -> type:
    """The class without its attributes: their functions may refer to the class, so they are filled in later."""
    made = types.new_class(name, bases, {"metaclass": kind}, lambda space: space.update(first))
    return _known(made)


def _fill_class(made: type, own: Mapping[str, object]) -> None:
    for name, value in own.items():
        setattr(made, name, value)


def _make_enum(base: Any, name: str, members: dict[str, Any], module: str, qualname: str) -> type:
    made: type = base(name, members, module=module, qualname=qualname)
    return _known(made)


def _known(made: type) -> type:
    """Let `__main__` have its own class by name, also where only an instance was sent."""
    if made.__module__ == MAIN and "." not in made.__qualname__:
        setattr(sys.modules[MAIN], made.__name__, made)
    return made


def _reduce_cached(value: functools.cached_property[Any]) -> Any:
    return _make_cached, (value.func, value.attrname)


def _make_cached(function: Callable[[Any], object], name: str) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _make_proxy(value: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(value)


def _reduce_module(module: types.ModuleType) -> Any:
    return importlib.import_module, (module.__name__,)


_REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    types.ModuleType: _reduce_module,
    types.CellType: _reduce_cell,
    types.MappingProxyType: lambda value: (_make_proxy, (dict(value),)),
    staticmethod: lambda value: (staticmethod, (value.__func__,)),
    classmethod: lambda value: (classmethod, (value.__func__,)),
    property: lambda value: (property, (value.fget, value.fset, value.fdel, value.__doc__)),
    functools.cached_property: _reduce_cached,
    # Dataclasses compare these markers by identity.
    type(dataclasses.MISSING): lambda _: (getattr, (dataclasses, "MISSING")),
    dataclasses._FIELD_BASE: lambda value: (getattr, (dataclasses, value.name)),  # type: ignore[attr-defined]
}
