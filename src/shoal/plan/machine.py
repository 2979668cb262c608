"""What was measured of this machine, for one number of workers on it: what each exchange adds to a step, and messages.

Each exchange was run for real, on models of several sizes, beside the same model trained by every worker alone: the
difference is what the exchange adds, with its hooks, its collectives and its share of the update. On cores that workers
share, communication takes their time; both sides were measured under the same load, so that is in it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.plan.interval import ZERO, Interval


@dataclass(frozen=True)
class Added:
    """What one exchange added to a step of one model."""

    parameters: int
    """Bytes that were trained."""
    tensors: int
    sent: float
    """Bytes that a worker sent in a step."""
    seconds: Interval


@dataclass(frozen=True)
class Machine:
    """One machine with so many workers at work."""

    workers: int
    cores: int
    added: Mapping[str, Sequence[Added]] = field(default_factory=dict)
    """By strategy, the smallest model first."""
    sums: Sequence[tuple[int, float]] = ()
    """Bytes and seconds of an all-reduce over all workers, the smallest first."""
    flops: float = 0.0
    """Of a worker, in products of matrices, with all neighbours at work."""
    code: Mapping[str, int] = field(default_factory=dict)
    """Bytes by which a worker's process grows when it first works so, with a model that is nothing: by strategy without
    numbers, and `tp` and `pp`."""
    microbatch: float = 0.0
    """Seconds that a pipeline over all workers takes for a micro-batch, beside what its stages compute."""

    def knows(self, family: str) -> bool:
        """Whether an exchange was measured."""
        return bool(self.added.get(family))

    def adds(self, family: str, parameters: int, tensors: int, sent: float) -> Interval:
        """What an exchange adds to a step of a model of so many bytes that sends so many.

        Between sizes that were measured along a line; beyond them in proportion; tensors more than those measured cost
        what they cost in the model of many.
        """
        rows = [row for row in self.added.get(family, ()) if row.tensors <= FEW]
        if not rows:
            return ZERO
        found = _between(rows, parameters)
        rate = _sent_at(rows, parameters)
        if (
            rate > 0 and sent > 0 and found.middle > 0
        ):  # more passes over the wire than were measured, or fewer
            found = found * min(max(sent / rate, 0.02), 64.0)
        many = next((row for row in self.added[family] if row.tensors > FEW), None)
        if many is not None and tensors > FEW:
            alone = _between(rows, many.parameters)
            each = max(0.0, many.seconds.middle - alone.middle) / (many.tensors - FEW)
            found = found + Interval.exact(each * (tensors - FEW))
        return found

    def sum_seconds(self, nbytes: float) -> float:
        """Seconds of an all-reduce: on a line between logarithms, beyond the largest in proportion."""
        if not self.sums or nbytes <= 0:
            return 0.0
        sizes = [size for size, _ in self.sums]
        at = bisect.bisect_left(sizes, nbytes)
        if at == 0:
            return self.sums[0][1]
        if at == len(sizes):
            return self.sums[-1][1] * nbytes / sizes[-1]
        (a, one), (b, two) = self.sums[at - 1], self.sums[at]
        share = math.log(nbytes / a) / math.log(b / a)
        return math.exp((1 - share) * math.log(one) + share * math.log(two))

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(found: Any) -> Machine | None:
        """Read back what `to_json` gave; None if it is not that.

        >>> made = Machine(2, 2, {"ddp": [Added(8, 1, 8.0, Interval(1.0, 2.0, 3.0))]}, [(4, 0.5)])
        >>> Machine.from_json(made.to_json()) == made, Machine.from_json({"workers": "x"})
        (True, None)
        """
        try:
            added = {
                str(name): [
                    Added(
                        int(row["parameters"]),
                        int(row["tensors"]),
                        _number(row["sent"]),
                        Interval(*(_number(row["seconds"][part]) for part in ("low", "middle", "high"))),
                    )
                    for row in rows
                ]
                for name, rows in found["added"].items()
            }
            sums = [(int(size), _number(seconds)) for size, seconds in found["sums"]]
            made = Machine(
                int(found["workers"]),
                int(found["cores"]),
                added,
                sums,
                _number(found["flops"]),
                {str(name): int(nbytes) for name, nbytes in found["code"].items()},
                _number(found["microbatch"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        good = all(size > 0 and seconds > 0 for size, seconds in sums) and made.workers > 0
        return made if good else None


FEW = 32
"""Tensors of the models by whose bytes exchanges were measured; another has more, and tells what each costs."""


def _number(value: Any) -> float:
    made = float(value)
    if not math.isfinite(made):
        raise ValueError(value)
    return made


def _between(rows: Sequence[Added], parameters: int) -> Interval:
    sizes = [row.parameters for row in rows]
    at = bisect.bisect_left(sizes, parameters)
    if len(rows) == 1 or at == 0:
        return rows[0].seconds
    if at == len(rows):  # the slope of the last piece goes on
        first, last = rows[-2], rows[-1]
    else:
        first, last = rows[at - 1], rows[at]
    share = (parameters - first.parameters) / (last.parameters - first.parameters)
    return first.seconds * (1 - share) + last.seconds * share


def _sent_at(rows: Sequence[Added], parameters: int) -> float:
    """Bytes that the measured model of this size would have sent."""
    largest = rows[-1]
    return largest.sent / largest.parameters * parameters if largest.parameters else 0.0
