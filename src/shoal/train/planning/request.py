"""What `shoal plan` asks of the workers that profile the user's model: plain values in one environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from shoal.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """One question."""

    workers: int
    """On all hosts."""
    hosts: int = 1
    net: float = 0.0
    """Bytes a second between hosts; 0: not given."""
    memory: float = 0.0
    """Bytes that a worker may take; 0: as much as is free."""
    exact: bool = False
    only: tuple[str, ...] = ()
    everything: bool = False
    as_json: bool = False
    plot: str = ""
    sweep: tuple[int, ...] = ()
    """Numbers of workers for which to draw curves."""
    cluster: str = ""
    """A TOML file that describes other machines; empty: this one."""
    seconds: float = 4.0
    """Of passes for real."""

    def question(self) -> str:
        """As SHOAL_DRY_RUN has it.

        >>> Request.of(Request(4, only=("ddp",)).question()) == Request(4, only=("ddp",))
        True
        """
        return f"plan {json.dumps(asdict(self))}"

    @staticmethod
    def of(question: str) -> Request:
        """Read it back."""
        try:
            found = json.loads(question.removeprefix("plan "))
            return Request(**{**found, "only": tuple(found["only"]), "sweep": tuple(found["sweep"])})
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"SHOAL_DRY_RUN={question!r} is no question; use `shoal plan`.") from None
