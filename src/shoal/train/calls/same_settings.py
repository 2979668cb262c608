"""What the script asks for has to be the same on every rank: steps with other parts would wait for each other, or train
something else without a word."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal.errors import ConfigError
from shoal.train.calls.same_code import PYTHON, Code, code_of
from shoal.world.world import World

_EACH_ITS_OWN = {
    *("log", "progress", "device", "loader_workers", "pin_memory", "worker_init_fn", "checkpoint"),
    *("model", "models", "columns"),
}
"""What may differ, or is compared where it is used."""


def agree_on_settings(settings: Mapping[str, object], world: World) -> None:
    """Refuse settings that differ between ranks: values, code of functions, how long the data is.

    Values that a function can see and that differ are said: only the script knows what they are for.
    """
    if world.size == 1:
        return
    compared = {name: value for name, value in settings.items() if name not in _EACH_ITS_OWN}
    everyone = world.gather_values([[name, _text_of(value)] for name, value in compared.items()])
    for rank, theirs in enumerate(everyone):
        for (name, first), (_, other) in zip(everyone[0], theirs, strict=True):
            if first != other:
                raise ConfigError(
                    f"ranks disagree on {name}=: rank 0 has {first}, rank {rank} has {other}; give Run the same "
                    "settings on every rank."
                )
    functions = {name: code_of(value) for name, value in compared.items() if _has_code(value)}
    said = _compare_code(world.gather_values([PYTHON, {n: asdict(c) for n, c in functions.items()}]))
    for sentence in said if world.rank == 0 else ():
        print(f"shoal: {sentence}", file=sys.stderr)


_FEW = 16
"""Entries of a list that are compared one by one: data can be a list too."""


def _has_code(value: object) -> bool:
    return callable(value) or (isinstance(value, Mapping) and any(callable(one) for one in value.values()))


def _compare_code(ranks: Sequence[tuple[str, dict[str, dict[str, Any]]]]) -> list[str]:
    """Refuse functions that differ; what is to be said of the values around them."""
    said = []
    for name in ranks[0][1]:
        codes = [Code(**functions[name]) for _, functions in ranks]
        for rank, code in enumerate(codes):
            if ranks[rank][0] == ranks[0][0] and code.digest != codes[0].digest:
                raise ConfigError(
                    f"ranks disagree on {name}=: rank 0 has {codes[0].where}, rank {rank} has {code.where}, whose code "
                    "is another; give Run the same functions on every rank."
                )
        for key, first, rank, other in _differing([code.given for code in codes]):
            raise ConfigError(
                f"ranks disagree on {name}=: its {key} is {first} on rank 0 and {other} on rank {rank}; give Run the "
                "same functions on every rank."
            )
        said += [
            f"{name}= sees {key} = {first} on rank 0 and {other} on rank {rank}; if it computes with that, ranks train "
            "different things."
            for key, first, rank, other in _differing([code.around for code in codes])
        ]
    return said


def _differing(ranks: Sequence[Mapping[str, str]]) -> list[tuple[str, str, int, str]]:
    """Name, rank 0's value, another rank and its value, without those by which a rank knows who or where it is."""
    found = []
    for key, first in ranks[0].items():
        values = [theirs.get(key, first) for theirs in ranks]
        numbers = [value in (str(rank), str(rank == 0)) for rank, value in enumerate(values)]
        if all(numbers) or all(map(_DEVICE.fullmatch, values)):
            continue
        other = next((rank for rank, value in enumerate(values) if value != first), None)
        if other is not None:
            found.append((key, first, other, values[other]))
    return found


_DEVICE = re.compile(r"'[a-z]+:\d+'")


def _text_of(value: Any) -> str:
    """A setting in words that do not depend on the process.

    >>> _text_of(0.5), _text_of(None), _text_of({"acc": print}), _text_of(print), _text_of([1, 2])
    ('0.5', 'None', 'acc', 'a function', '2 entries')
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" if isinstance(v, str) else str(k) for k, v in value.items()) or "none"
    if isinstance(value, list | tuple) and len(value) <= _FEW and any(callable(one) for one in value):
        return ", ".join(_text_of(one) for one in value)
    try:
        return f"{len(value)} entries"
    except (TypeError, NotImplementedError):  # a function, or a stream, which has no length
        return "a function" if callable(value) else f"a {type(value).__name__}"
