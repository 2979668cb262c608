"""The contract of a partition: which part of a step each sample goes to.

A partition divides an array of sample ids among parts: every id goes to exactly one part. It is a pure function of the
ids, of one key a sample, of one weight a part and, where it draws, of a seed. So every worker computes the whole
division by itself and takes its own parts, and nobody has to ask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.partition.cuts import Ids, Weights
from shoal.types import Promise

Keys = npt.NDArray[Any]
"""One value a sample: numbers, or text."""

OWN = "id"
"""The column that every data set has: the number of the sample itself."""


class Partition(ABC):
    """A way to divide samples. Each choice is a frozen dataclass of its own options; `shares` is among them."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str]
    counted: ClassVar[bool] = True
    """True if parts are as large as their weights say, up to one sample; False where keys decide."""
    numbers: ClassVar[bool] = False
    """True if keys have to be numbers."""
    shares: str
    """What each worker should get relative to the others, joined by "/"; empty: all alike."""

    def __post_init__(self) -> None:
        self._shares()

    @abstractmethod
    def divide(self, ids: Ids, keys: Keys, weights: Weights, seed: int) -> list[Ids]:
        """One array of ids for each weight. `keys[i]` belongs to `ids[i]`."""

    def cuts(self, count: int, weights: Weights) -> list[tuple[int, int]] | None:
        """Where each part begins and ends, if it is a stretch of the ids as they come; None if ids or keys matter."""
        del count, weights
        return None

    @property
    def keyed_by(self) -> str:
        """The column that keys come from."""
        return OWN

    @property
    def reach(self) -> int:
        """So many global batches of the order are sorted together by key; 0 leaves the order alone."""
        return 0

    @property
    def even(self) -> bool:
        """Whether parts differ by at most one sample."""
        return self.counted and len(set(self._shares())) < 2

    def weights(self, parts: int) -> Weights:
        """One weight a part: each worker's share, for all of its micro-batches alike."""
        shares = self._shares() or (1.0,)
        if parts == 1:  # nothing to divide: one process alone, or the reference of `verify`
            shares = (1.0,)
        if parts % len(shares):
            raise ConfigError(
                f"shares={self.shares} are for {len(shares)} workers, and a step is cut into {parts} parts, which "
                f"{len(shares)} does not divide; give one share for each worker."
            )
        return np.repeat(np.array(shares), parts // len(shares))

    def _shares(self) -> tuple[float, ...]:
        try:
            shares = tuple(float(word) for word in self.shares.split("/")) if self.shares else ()
        except ValueError:
            shares = (0.0,)
        if not all(1e-6 <= share <= 1e6 for share in shares):
            raise ConfigError(
                f"shares={self.shares}: give each worker a number from 1e-6 to 1e6, joined by '/', as in shares=2/1/1."
            )
        return shares
