"""What a tracker has to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol

Numbers = Mapping[str, float]


class Tracker(Protocol):
    """An adapter to somebody's tracker. One thread makes it, calls it and closes it, and catches what it raises."""

    summary: ClassVar[str]
    """One line for `shoal list`."""
    needs: ClassVar[str]
    """The package that it is made of."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, object]) -> None:
        """`folder`: the run's, to write into where the tracker works offline. `name`: of the run."""

    def log(self, values: Numbers, step: int) -> None:
        """Numbers by name, after so many steps; steps only grow."""

    def close(self) -> None:
        """The run is over."""
