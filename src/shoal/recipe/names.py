"""Parameters by a pattern of their names."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from shoal.errors import ConfigError
from shoal.table import did_you_mean


def matching(who: str, patterns: str, names: Iterable[str]) -> list[str]:
    """The names that fit one of the patterns, which commas separate; a name stands for all that is below it, too.

    >>> matching("freeze", "0, *.bias", ["0.weight", "0.bias", "1.weight", "1.bias"])
    ['0.weight', '0.bias', '1.bias']
    """
    known = list(names)
    given = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in given or [""]:
        if not any(fits(pattern, name) for name in known):
            modules = {name.rpartition(".")[0] for name in known} - {""}
            raise ConfigError(f"{who}: no parameter fits '{pattern}'{did_you_mean(pattern, modules)}")
    return [name for name in known if any(fits(pattern, name) for pattern in given)]


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern names a parameter, or a module that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
