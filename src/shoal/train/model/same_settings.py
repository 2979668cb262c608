"""What the script asks for has to be the same on every rank: steps with other parts would wait for each other, or train
something else without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import ConfigError
from shoal.world.world import World

_EACH_ITS_OWN = {
    *("log", "progress", "device", "loader_workers", "pin_memory", "worker_init_fn", "checkpoint"),
    *("model", "models", "columns"),
}
"""What may differ, or is compared where it is used."""


def agree_on_settings(settings: Mapping[str, Any], world: World) -> None:
    """Refuse settings that differ between ranks: values, which functions are given, how long the data is."""
    if world.size == 1:
        return
    mine = [[name, _text_of(value)] for name, value in settings.items() if name not in _EACH_ITS_OWN]
    everyone = world.gather_values(mine)
    for rank, theirs in enumerate(everyone):
        for (name, first), (_, other) in zip(everyone[0], theirs, strict=True):
            if first != other:
                raise ConfigError(
                    f"ranks disagree on {name}=: rank 0 has {first}, rank {rank} has {other}; give Run the same "
                    "settings on every rank."
                )


def _text_of(value: Any) -> str:
    """A setting in words that do not depend on the process.

    >>> _text_of(0.5), _text_of(None), _text_of({"acc": print}), _text_of(print), _text_of([1, 2])
    ('0.5', 'None', 'acc', 'a function', '2 entries')
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" if isinstance(v, str) else str(k) for k, v in value.items()) or "none"
    try:
        return f"{len(value)} entries"
    except (TypeError, NotImplementedError):  # a function, or a stream, which has no length
        return "a function" if callable(value) else f"a {type(value).__name__}"
