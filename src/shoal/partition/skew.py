"""How uneven a division is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.partition.cuts import Weights


def skew(steps: Sequence[Sequence[int]], weights: Weights) -> float:
    """The largest part of a step over its fair share, as the mean over steps. All wait for it: 1.0 is the best.

    >>> skew([[3, 1], [2, 2]], np.array([1.0, 1.0]))
    1.25
    """
    found = [max(np.array(sizes) / (weights * (sum(sizes) / weights.sum()))) for sizes in steps if any(sizes)]
    return float(np.mean(found)) if found else 1.0
