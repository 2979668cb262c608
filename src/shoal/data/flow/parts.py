"""Samples and splits that depend on a key alone: the same rows on every engine, in any order, and tomorrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from shoal.data.flow.engine import Engine, Table, Value, need_ibis
from shoal.errors import ConfigError
from shoal.seeds import derive

_JOINED = "\x1f"
"""Between the parts of a key of several columns."""


def unit(engine: Engine, table: Table, keys: Sequence[str], seed: int, what: str) -> Value:
    """A number from 0 to 1 for each row, by a hash of its key: rows with one key stay together."""
    ibis = need_ibis()
    for name in keys:
        kind = table.schema()[name]
        if not (kind.is_integer() or kind.is_string() or kind.is_boolean() or kind.is_date()):
            raise ConfigError(
                f"{what} by column '{name}', which is {kind}; a key is a whole number, text or a date."
            )
    texts = [ibis.coalesce(table[name].cast("string"), "") for name in keys]
    text = texts[0]
    for other in texts[1:]:
        text = text + _JOINED + other
    salt = derive(seed, what) & 0xFFFFFFFFFFFFFFFF

    def place(key: str) -> float:
        return float(xxhash.xxh3_64_intdigest(key.encode(), seed=salt) >> 11) / 9007199254740992.0

    string, number = ibis.dtype("string"), ibis.dtype("float64")
    return engine.function(place, f"place_{salt:x}", [string], number)(text)


def check_parts(parts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Each part with where it begins and ends.

    >>> check_parts({"train": 0.75, "test": 0.25})
    [('train', 0.0, 0.75), ('test', 0.75, 1.0)]
    """
    total = sum(parts.values())
    if not parts or abs(total - 1) > 1e-9 or min(parts.values()) <= 0:
        shown = ", ".join(f"{name}: {share:g}" for name, share in parts.items())
        raise ConfigError(f"split into {shown}: the parts make {total:g}; give shares above 0 that make 1.")
    bounds = []
    begin = 0.0
    names = list(parts)
    for name in names:
        end = 1.0 if name == names[-1] else begin + parts[name]
        bounds.append((name, begin, end))
        begin = end
    return bounds
