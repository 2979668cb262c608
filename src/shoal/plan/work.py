"""What training one model takes on one worker, before it is shared: measured passes, and how it can be divided."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.cost import ModelProfile
from shoal.plan.interval import Interval


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass over so many samples."""

    samples: int
    seconds: Interval
    """With all neighbours at work."""
    held: int
    """Bytes at the peak of the pass beside what a worker holds all the time: activations, temporaries, slack."""


@dataclass(frozen=True)
class Division:
    """One way to divide the model."""

    parts: Sequence[ModelProfile]
    """What each worker of one replica holds, in the order of ranks; for micro-batches of `samples`."""
    samples: int
    cut: float = 0.0
    """Share of the passes that tensor ranks divide among them."""
    stages: Sequence[float] = ()
    """Share of the passes that each stage computes, in their order."""
    building: int = 0
    """Bytes, beside the whole model, that a worker needs for a moment to find its part."""
    text: str = ""
    """The plan that real workers have tried; empty where none have."""
    batch: int = 0
    """Their global batch."""
    accumulate: int = 1
    seconds: Interval | None = None
    """Of a step of these."""
    built: int = 0
    """Bytes of the one that held the most until its part was made, process included."""
    peak: int = 0
    """The same in such steps."""


Degrees = tuple[int, int, int]
"""Tensor degree, workers of a pipeline, and stages of each of them."""


@dataclass(frozen=True)
class Work:
    """A profile. Everything that predictions follow from, beside the machine."""

    key: str
    """Names the model, its settings and its batch, without saying which."""
    passes: Sequence[Pass]
    """The smallest first."""
    update: Interval
    """Seconds of the optimizer for the whole model, and of all else that a step does once."""
    data: Interval
    """Seconds for each sample that a worker fetches."""
    whole: ModelProfile
    divisions: Mapping[Degrees, Division] = field(default_factory=dict)
    refused: Mapping[Degrees, str] = field(default_factory=dict)
    """Why the model cannot be divided so."""
    exchanges: Mapping[str, str] = field(default_factory=dict)
    """Exchanges that cannot train this model, and why."""
    compression: str = ""
    """Why nothing on the wire can be compressed; empty where it can."""
    base: int = 0
    """Bytes of a worker's process before it has a model."""
    neighbours: int = 1
    """Workers that were at work at the same time."""
    alone: float = 1.0
    """Time of a pass with no neighbour, as a share of that with all of them."""
    traced: bool = False
    """Whether nothing was run: seconds follow from counted operations, and bytes from shapes."""
    note: str = ""
    """How the profile came about."""

    @property
    def parameters(self) -> int:
        """Bytes that are trained."""
        return sum(p.nbytes for p in self.whole.trained)

    def seconds(self, samples: float) -> Interval:
        """Of a pass over so many samples: on a line between those measured; a pass over none takes no time.

        >>> one = Work("", [Pass(1, Interval.exact(1.0), 0), Pass(3, Interval.exact(2.0), 0)], Interval.exact(0),
        ...            Interval.exact(0), ModelProfile(()))
        >>> one.seconds(2).middle, one.seconds(5).middle, one.seconds(0.5).middle
        (1.5, 3.0, 0.75)
        """
        first, second, share = self._place(samples)
        found = first.seconds * (1 - share) + second.seconds * share
        smallest, largest = self.passes[0], self.passes[-1]
        if smallest.samples <= samples <= largest.samples:
            return found
        # Nobody has measured there. Fewer samples are no faster each, and more take no less together.
        least = (
            smallest.seconds * (samples / smallest.samples) if samples < smallest.samples else largest.seconds
        )
        low, high = max(found.low, least.low), max(found.high, least.high)
        return Interval(low, max(found.middle, least.middle), high).widened(_OUTSIDE)

    def held(self, samples: float) -> int:
        """Bytes at the peak of such a pass."""
        first, second, share = self._place(samples)
        return max(0, round(first.held * (1 - share) + second.held * share))

    def _place(self, samples: float) -> tuple[Pass, Pass, float]:
        sizes = [one.samples for one in self.passes]
        if len(sizes) == 1:
            only = self.passes[0]
            return Pass(0, Interval.exact(0.0), 0), only, samples / only.samples
        at = min(max(bisect.bisect_left(sizes, samples), 1), len(sizes) - 1)
        first, second = self.passes[at - 1], self.passes[at]
        return first, second, (samples - first.samples) / (second.samples - first.samples)


_OUTSIDE = 0.15
"""How uncertain a pass of a size outside of what was measured is at least."""
