"""What a function is, in words that two processes can compare: its code, its defaults, and the values around it.

Code is compared as it was compiled: instructions, constants and names, of helpers of the same script too. A function
of the same file is the same on every rank; one that was defined in an `if rank` is not, whatever its name.

Values around it, in a closure, in globals or on an object, may differ for good reasons: only the script knows whether
it computes with them.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.functions import globals_read

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LONGEST = 80
"""Characters of a value that are shown."""
_LARGEST = 2**22
"""Bytes of a tensor that are looked at."""


@dataclass
class Code:
    """What has been found out about a function."""

    digest: str = ""
    """Of all code: equal where that is."""
    where: str = ""
    """A name with file and line, or a class."""
    given: dict[str, str] = field(default_factory=dict)
    """Defaults and arguments of functools.partial: part of the function."""
    around: dict[str, str] = field(default_factory=dict)
    """Values that it can see."""


def code_of(value: object) -> Code:
    """Of a function, a class, an object that can be called, or several of them by name.

    >>> code_of(functools.partial(max, default=3)).given
    {'default': '3'}
    """
    walk = _Walk()
    walk.add(value)
    return Code(walk.digest.hexdigest(), walk.where, walk.given, walk.around)


class _Walk:
    """Goes from a function to what it calls, as far as that is the user's own."""

    def __init__(self) -> None:
        # Not for secrecy: two codes that differ must not look alike.
        self.digest = hashlib.blake2b(digest_size=16)
        self.where = ""
        self.given: dict[str, str] = {}
        self.around: dict[str, str] = {}
        self._seen: set[int] = set()

    def add(self, value: object) -> None:
        """Take a callable into the digest."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Mapping):
            for key, one in value.items():
                self._note(str(key))
                self.add(one)
        elif isinstance(value, functools.partial):
            self.add(value.func)
            self._values(enumerate(value.args), self.given)
            self._values(value.keywords.items(), self.given)
        elif isinstance(value, types.MethodType):
            self.add(value.__func__)
            self._object(value.__self__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif callable(value) and not isinstance(value, types.BuiltinFunctionType):
            self._class(type(value))
            self._object(value)
        else:
            self._note(getattr(value, "__qualname__", type(value).__qualname__))
            self.where = self.where or getattr(value, "__qualname__", "")

    def _note(self, *texts: str) -> None:
        for text in texts:
            self.digest.update(f"{len(text)}:{text}".encode())

    def _function(self, function: types.FunctionType) -> None:
        code, known = function.__code__, function.__globals__
        self.where = self.where or f"{function.__name__} of {code.co_filename}:{code.co_firstlineno}"
        free = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = [(name, cell.cell_contents) for name, cell in free if cell != _EMPTY]
        if _is_installed(
            known.get("__name__", "")
        ):  # what a decorator has made: what it decorates is held there
            self._note(function.__qualname__)
            self._values(held, self.around)
            return
        self._code(code)
        named = code.co_varnames[: code.co_argcount]
        last = function.__defaults__ or ()
        defaults = {
            **dict(zip(named[len(named) - len(last) :], last, strict=True)),
            **(function.__kwdefaults__ or {}),
        }
        self._values(defaults.items(), self.given)
        self._values(held, self.around)
        self._values([(n, known[n]) for n in sorted(set(globals_read(code))) if n in known], self.around)

    def _code(self, code: types.CodeType) -> None:
        # `co_code` is as compiled: what the interpreter has put in place of instructions since is not in it.
        self._note(code.co_code.hex(), *code.co_names, *code.co_freevars, str(code.co_flags))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self._note(_constant(constant))

    def _class(self, kind: type) -> None:
        self.where = self.where or f"{kind.__module__}.{kind.__qualname__}"
        for one in kind.__mro__:
            self._note(one.__qualname__)
            if _is_installed(one.__module__):
                continue
            for name, part in sorted(vars(one).items()):
                inner = getattr(part, "__func__", getattr(part, "fget", part))
                if isinstance(inner, types.FunctionType):
                    self._note(name)
                    self.add(inner)

    def _object(self, owner: object) -> None:
        state = dict(getattr(owner, "__dict__", {}))
        if isinstance(owner, nn.Module):
            state |= dict(owner.named_buffers())
        self._values([(k, v) for k, v in state.items() if not k.startswith("_")], self.around)

    def _values(self, items: Iterable[tuple[object, object]], into: dict[str, str]) -> None:
        for name, value in items:
            text = _text_of(value)
            if text is not None:
                into[f"{name} ({len(into)})" if name in into else str(name)] = text
            elif _is_theirs(value):
                self.add(value)


def _is_theirs(value: object) -> bool:
    """Whether it is something that the script has made, and has code."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return True
    return isinstance(value, type) and not _is_installed(value.__module__)


_EMPTY = types.CellType()


def _is_installed(module: str) -> bool:
    """Whether it is of a package that is the same on all ranks, and large."""
    return module.partition(".")[0] in ("torch", "numpy", "shoal", "transformers", *sys.stdlib_module_names)


def _constant(value: object) -> str:
    """A constant of compiled code; the order of a set is another one in each process."""
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(_constant, value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return repr(value)


def _text_of(value: object) -> str | None:
    """A value in words; None for what cannot be told."""
    if isinstance(value, _PLAIN):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({zlib.crc32(text.encode()):08x})"
    if isinstance(value, list | tuple) and len(value) <= 16 and all(isinstance(v, _PLAIN) for v in value):
        return _text_of(repr(value))
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        if value.numel() * value.itemsize > _LARGEST or type(value) not in (torch.Tensor, nn.Parameter):
            return None
        numbers = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"a tensor of shape {list(value.shape)} ({zlib.crc32(numbers):08x})"
    return None


PYTHON = sys.implementation.cache_tag or sys.version
"""Compiled code can be compared between equal versions only."""
