"""A pickle read as plain data. No name in it is imported, nothing it asks for is called, and what a file may name at
all is a short list: so a file of somebody else's can be looked into.

A pickle is a program for a small stack machine. `pickletools` of the standard library takes it apart without running
it; what is left is a list of operations, and those that build values are done here.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeVar

_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = (
    "UNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset(("PROTO", "FRAME"))


@dataclass(frozen=True)
class Name:
    """Something that unpickling would have imported."""

    text: str


@dataclass(eq=False)
class Made:
    """Something that unpickling would have called a name for: the name, what it would have been given, what then
    set on it."""

    name: str
    args: tuple[object, ...]
    state: object = None


def read(data: bytes, allowed: Collection[str]) -> object:
    """The value of a pickle that names nothing but what is allowed; ValueError, with a reason, for any other.

    >>> import pickle, os
    >>> read(pickle.dumps({"a": [1, 2.5, None]}), allowed=())
    {'a': [1, 2.5, None]}
    >>> read(pickle.dumps(os.getcwd), allowed=("collections.OrderedDict",))
    Traceback (most recent call last):
    ValueError: it asks for posix.getcwd, which has nothing to do with numbers
    """
    machine = _Machine(frozenset(allowed))
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name == "STOP":
                return machine.stack.pop()
            machine.do(operation.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"it is no sensible pickle ({type(error).__name__}: {error})") from error
    raise ValueError("it ends too early")


def whole_numbers(value: object) -> tuple[int, ...]:
    """A shape, a stride or a place in a tensor; ValueError for anything else."""
    if not isinstance(value, list | tuple) or not all(isinstance(number, int) for number in value):
        raise ValueError(f"it has {value!r} where whole numbers belong")
    return tuple(value)


Kind = TypeVar("Kind")


@dataclass
class _Machine:
    allowed: frozenset[str]
    stack: list[object] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)

    def do(self, name: str, argument: object) -> None:
        stack = self.stack
        if name in _NUMBERS or name in _TEXTS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[_place(argument)])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[_place(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in _TUPLES:
            self.put(tuple(self.take(_TUPLES[name])))
        elif name not in _IGNORED and not self._fill(name) and not self._make(name, argument):
            raise ValueError(f"it has an operation that is not for data ({name})")

    def _fill(self, name: str) -> bool:
        """Containers, and what goes into them."""
        if name in ("EMPTY_DICT", "EMPTY_LIST"):
            self.put({} if name == "EMPTY_DICT" else [])
        elif name == "TUPLE":
            self.put(tuple(self.since_mark()))
        elif name == "LIST":
            self.put(self.since_mark())
        elif name == "DICT":
            self.put(_pairs(self.since_mark()))
        elif name in ("APPEND", "APPENDS"):
            values = self.take(1) if name == "APPEND" else self.since_mark()
            self.last(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = self.take(2) if name == "SETITEM" else self.since_mark()
            self.last(dict).update(_pairs(values))
        else:
            return False
        return True

    def _make(self, name: str, argument: object) -> bool:
        """What would import and call."""
        if name == "GLOBAL":
            module, called = str(argument).split(" ")
            self.put(self._name(module, called))
        elif name == "STACK_GLOBAL":
            self.put(self._name(*self.take(2)))
        elif name in ("REDUCE", "NEWOBJ"):
            self.put(_made(*self.take(2)))
        elif name == "BUILD":
            (state,) = self.take(1)
            made = self.stack[-1]
            if isinstance(made, Made):  # a dict has no use for attributes
                made.state = state
        elif name == "BINPERSID":
            self.put(Made("", _arguments(*self.take(1))))
        else:
            return False
        return True

    def _name(self, module: object, name: object) -> Name:
        text = f"{module}.{name}"
        if text not in self.allowed:
            raise ValueError(f"it asks for {text}, which has nothing to do with numbers")
        return Name(text)

    def put(self, value: object) -> None:
        self.stack.append(value)

    def last(self, kind: type[Kind]) -> Kind:
        found = self.stack[-1]
        if not isinstance(found, kind):
            raise TypeError(f"{type(found).__name__} where a {kind.__name__} belongs")
        return found

    def take(self, count: int) -> list[object]:
        """The last so many values."""
        if len(self.stack) < count:
            raise IndexError("too few values")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def since_mark(self) -> list[object]:
        place = self.marks.pop()
        taken = self.stack[place:]
        del self.stack[place:]
        return taken


def _pairs(values: list[object]) -> dict[object, object]:
    if len(values) % 2:
        raise IndexError("a key without a value")
    return dict(zip(values[::2], values[1::2], strict=True))


def _place(argument: object) -> int:
    """The number under which something is remembered."""
    if not isinstance(argument, int):
        raise TypeError(f"{argument!r} where a number belongs")
    return argument


def _arguments(given: object) -> tuple[object, ...]:
    if not isinstance(given, tuple):
        raise TypeError(f"{type(given).__name__} where a tuple of arguments belongs")
    return given


def _made(name: object, given: object) -> object:
    """Dicts and sizes as what they are; anything else as a note of what would have been called."""
    if not isinstance(name, Name):
        raise TypeError(f"{name!r} is called")
    args = _arguments(given)
    if name.text == "collections.OrderedDict":
        return _ordered(*args)
    if name.text == "torch.Size":
        return whole_numbers(*args)
    return Made(name.text, args)


def _ordered(pairs: object = ()) -> dict[object, object]:
    """What an OrderedDict is made of: nothing, or a list of pairs."""
    if isinstance(pairs, dict):
        return dict(pairs)
    if not isinstance(pairs, list | tuple):
        raise TypeError(f"{type(pairs).__name__} where pairs belong")
    return dict(pairs)
