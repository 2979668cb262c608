"""Python functions of the user's, as functions of columns: by the names and types that they are written with."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator

from shoal.data.flow.engine import MARK, DataType, need_ibis
from shoal.errors import ConfigError
from shoal.functions import globals_read
from shoal.table import did_you_mean

_SHOWN = 60


class RowError(Exception):
    """A function of the user's raised; the text has the values it was called with."""


def signature_of(call: Callable[..., object], known: dict[str, DataType]) -> tuple[list[str], DataType]:
    """The columns that a function takes, by the names of its parameters, and the type that it gives.

    >>> def half(x: float) -> float: return x / 2
    >>> names, gives = signature_of(half, {"x": "float64"})
    >>> names, str(gives)
    (['x'], 'float64')
    """
    name = name_of(call)
    names = list(inspect.signature(call).parameters)
    for wanted in names:
        if wanted not in known:
            raise ConfigError(
                f"function '{name}' takes '{wanted}', and there is no such column{did_you_mean(wanted, known)} "
                "Its parameters are named like columns."
            )
    try:
        hints = typing.get_type_hints(call)
    except Exception as error:
        raise ConfigError(f"the types of function '{name}' cannot be read ({error}).") from error
    if "return" not in hints:
        raise ConfigError(
            f"function '{name}' does not say what it gives; write its type, as in def {name}(…) -> float."
        )
    try:
        return names, need_ibis().dtype(hints["return"])
    except Exception as error:
        raise ConfigError(
            f"function '{name}' gives {hints['return']!r}, which is no type of a column; use int, float, str, "
            "bytes, bool or lists of them."
        ) from error


def name_of(call: Callable[..., object]) -> str:
    """What a function is called."""
    return str(getattr(call, "__name__", type(call).__name__)).strip("<>")


def with_row(call: Callable[..., object], names: list[str]) -> Callable[..., object]:
    """A function that, if it raises, says what it was called with."""
    title = name_of(call)

    def called(*values: object) -> object:
        try:
            return call(*values)
        except Exception as error:
            shown = ", ".join(f"{name}={_short(value)}" for name, value in zip(names, values, strict=True))
            raise RowError(
                f"{MARK}{title}({shown}) raised {type(error).__name__}: {_short(error, '')}"
            ) from error

    return called


def source_of(call: Callable[..., object]) -> str:
    """The text of a function, with the constants and functions of the script that it reads: for the lineage.

    >>> limit = 3
    >>> source_of(eval("lambda text: text[:limit]", {"limit": limit})).splitlines()[-1]
    'limit = 3'
    """
    return "\n".join(_parts_of(call, set()))


def _parts_of(call: Callable[..., object], seen: set[str]) -> Iterator[str]:
    try:
        yield inspect.getsource(call)
    except (OSError, TypeError):
        yield name_of(call)
    if not isinstance(call, types.FunctionType):
        return
    read = {name: call.__globals__[name] for name in globals_read(call.__code__) if name in call.__globals__}
    cells = zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)
    read |= {name: cell.cell_contents for name, cell in cells}
    for name, value in sorted(read.items()):
        if name in seen:
            continue
        seen.add(name)
        if isinstance(value, _PLAIN):
            yield f"{name} = {value!r}"
        elif isinstance(value, types.FunctionType):
            yield from _parts_of(value, seen)


_PLAIN = (int, float, str, bytes, tuple, frozenset, list, dict, set, type(None))


def _short(value: object, quote: str = "r") -> str:
    text = (repr(value) if quote else str(value)).replace("\n", "\\n")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
