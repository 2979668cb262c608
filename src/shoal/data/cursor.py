"""Where a run stands in its data, and how steps lie in epochs.

Everything follows from (seed, epoch, position): samples before `position` of the order of that epoch have been used,
the others have not. Who used them, in batches of which size, and what was prepared ahead does not matter, so a run
goes on from here with another number of workers and another batch size, and no sample comes twice or is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.partition.bucket import MOST_BATCHES
from shoal.seeds import derive

_MOST = {
    "epoch": 2**53,
    "position": 2**62,
    "samples": 2**62,
    "batch": 2**40,
    "grain": 2**40,
    "window": MOST_BATCHES,
}
"""Limits keep the state below 200 bytes of JSON, whatever the numbers are."""
_MOST_TEXT = 60


@dataclass(frozen=True)
class Cursor:
    """A place in the data, and what decides which samples come next.

    >>> Cursor(epoch=3, position=512, samples=100_000, seed=7, batch=256).to_state()["position"]
    512
    """

    epoch: int
    position: int
    """Samples of this epoch that have been used."""
    samples: int
    """In an epoch; 0 if that is not known."""
    seed: int
    batch: int
    """Samples per step."""
    grain: int = 0
    """Samples in each batch of a window, if the order of this epoch is sorted in windows."""
    window: int = 0
    """Batches in a window, if the order of this epoch is sorted in windows; else 0."""
    shuffle: bool | str = True
    """Or the name of the order, as "blocks(65536, window=16)"."""

    def to_state(self) -> dict[str, int | bool | str]:
        """Plain values, at most 200 bytes as compact JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_state(state: Mapping[str, object]) -> Cursor:
        """The cursor that `to_state` wrote down. What comes from a disk may be anything, so all of it is checked.

        >>> Cursor.from_state({"epoch": 0, "position": -1})
        Traceback (most recent call last):
        shoal.errors.ConfigError: the place in the data is damaged: position is -1; use another checkpoint.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(_damaged(f"it is a {type(state).__name__}"))
        known = {field.name: state.get(field.name) for field in dataclasses.fields(Cursor)}
        for name, value in known.items():
            limit = _MOST.get(name)
            if name == "shuffle" and isinstance(value, str) and len(value) <= _MOST_TEXT:
                continue
            right = type(value) is (bool if name == "shuffle" else int)
            if not right or (limit is not None and not 0 <= value <= limit):  # type: ignore[operator]
                raise ConfigError(_damaged(f"{name} is {value!r}"))
        cursor = Cursor(**known)  # type: ignore[arg-type]
        if cursor.samples and cursor.position >= cursor.samples:
            raise ConfigError(_damaged(f"position is {cursor.position} of {cursor.samples} samples"))
        if cursor.batch < 1 or (cursor.window > 0) != (cursor.grain > 0):
            raise ConfigError(_damaged(f"batch {cursor.batch}, window {cursor.window}, grain {cursor.grain}"))
        return cursor


def _damaged(how: str) -> str:
    return f"the place in the data is damaged: {how}; use another checkpoint."


def short_seed(seed: int) -> int:
    """The seed itself, or a key of it if it needs more than 64 bits."""
    return seed if -(2**63) <= seed < 2**63 else derive(seed, "cursor")


class Track:
    """Which positions of which epoch each step has: from one known place on, one batch after the other.

    The last batch of an epoch is as long as what is left of it.

    >>> track = Track(samples=10, batch=4)
    >>> [track.span(step) for step in range(4)]
    [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]
    >>> Track(samples=10, batch=5, step=1, epoch=0, position=4).span(2)
    (0, 9, 10)
    """

    __slots__ = ("_rest", "batch", "begun", "epoch", "per_epoch", "position", "samples", "step")

    def __init__(
        self,
        samples: int,
        batch: int,
        step: int = 0,
        epoch: int = 0,
        position: int = 0,
        begun: int | None = None,
    ) -> None:
        """Step `step` begins at `position` of `epoch`, which has `begun` samples if not as many as the others."""
        self.samples = samples
        self.begun = samples if begun is None else begun
        self.batch = batch
        self.per_epoch = -(-samples // batch)
        if (
            self.begun == samples
            and position % batch == 0
            and step == epoch * self.per_epoch + position // batch
        ):
            step, epoch, position = 0, 0, 0  # where the run would be anyway: then earlier steps are known too
        self.step = step
        self.epoch = epoch
        self.position = position
        self._rest = -(-(self.begun - position) // batch)

    def span(self, step: int) -> tuple[int, int, int]:
        """The epoch of a step, and its positions [start, stop)."""
        ahead = step - self.step
        if ahead >= self._rest:
            # After the present epoch, all have as many steps.
            more, inside = divmod(ahead - self._rest, self.per_epoch)
            epoch, start = self.epoch + 1 + more, inside * self.batch
        elif ahead >= 0:
            epoch, start = self.epoch, self.position + ahead * self.batch
        else:
            raise ConfigError(
                f"step {step + 1} lies before step {self.step + 1}, with which this run goes on; where its samples "
                "were is not known any more."
            )
        stop = start + self.batch
        end = self.samples if epoch > self.epoch else self.begun
        return epoch, start, stop if stop < end else end

    def until(self, epochs: float) -> int:
        """How many steps the run has made when so many epochs are complete; at least those that it has made already.

        >>> Track(samples=10, batch=4).until(2), Track(samples=10, batch=4).until(0.5)
        (6, 2)
        """
        whole = int(epochs)
        part = epochs - whole
        if whole > self.epoch:
            begun = self.step + self._rest + (whole - self.epoch - 1) * self.per_epoch
            return begun + round(part * self.per_epoch)
        done = self.position / self.begun
        if whole < self.epoch or part <= done:
            return self.step
        return self.step + round((part - done) / (1 - done) * self._rest)
