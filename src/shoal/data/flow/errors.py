"""What ibis and engines raise, as one sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal.data.flow.engine import sentence
from shoal.errors import ConfigError
from shoal.table import did_you_mean

_NO_COLUMN = re.compile(r"'Table' object has no attribute '(.*)'|Column '(.*)' is not found in table")


@contextmanager
def expressions(columns: Sequence[str]) -> Iterator[None]:
    """Where a flow is written: a wrong name or type is a sentence.

    >>> with expressions(["age"]):
    ...     raise AttributeError("'Table' object has no attribute 'agee'")
    Traceback (most recent call last):
    shoal.errors.ConfigError: there is no column 'agee'; did you mean 'age'? There are: age.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError, KeyError) as error:  # ibis' own are among them, or below
        raise _explained(error, columns) from error
    except Exception as error:
        if type(error).__module__.startswith("ibis"):
            raise _explained(error, columns) from error
        raise


def _explained(error: Exception, columns: Sequence[str]) -> Exception:
    match = _NO_COLUMN.search(str(error))
    if match is not None:
        name = match[1] or match[2]
        return ConfigError(f"there is no column '{name}'{did_you_mean(name, columns)}")
    return ConfigError(f"the flow cannot do this ({sentence(error)}); its columns are {', '.join(columns)}.")


@contextmanager
def running(what: str) -> Iterator[None]:
    """Where an engine works: what it raises is one sentence, and nothing is half-written."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        raise ConfigError(f"{what} failed: {sentence(error)}.") from error
