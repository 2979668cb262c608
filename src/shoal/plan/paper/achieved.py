"""What of a card's peaks training really reaches: a few fractions, each measured by fitting them to published runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Achieved:
    """Fractions of the maker's numbers, and times that no maker gives."""

    matrix: float
    """Of the peak, in products of matrices that are large enough."""
    attention: float
    """Of the peak, in attention itself."""
    stream: float
    """Passes over a layer's activations at full memory bandwidth that element by element work takes."""
    inside: float
    """Of the bandwidth inside of a host."""
    between: float
    """Of the bandwidth between hosts."""
    launch: float
    """Seconds that a layer takes beside all that, each time it runs."""
    fixed: float
    """Seconds of a step that belong to nothing else, for each doubling of the number of hosts."""
    odd_heads: float
    """How much longer attention and projections take where the width of a head is no multiple of 8 numbers."""
    error: float = 0.0
    """The mean relative error of the runs that it was fitted to."""
    source: str = ""


TYPICAL = Achieved(
    0.47, 0.553, 6.02, 0.205, 1.0, 1.5e-5, 0.0162, 6.0, 0.193, "264 published runs on 7 kinds of card"
)
"""Of a card that nobody has published a run on: what fits those of all others best. Expect no more than its `error`."""

FITTED: Mapping[str, Achieved] = {
    "H100": Achieved(0.648, 0.319, 116.0, 1.0, 1.0, 0.0011, 0.00894, 1.3, 0.153, "48 published runs"),
    "A100-80GB": Achieved(0.634, 0.587, 6.47, 0.113, 0.104, 0.003, 0.00384, 6.0, 0.113, "138 published runs"),
    "A100-40GB": Achieved(0.749, 0.535, 80.0, 0.49, 0.658, 0.0013, 0.0235, 1.3, 0.0407, "39 published runs"),
    "V100": Achieved(0.746, 0.478, 34.6, 0.768, 0.6, 0.00032, 0.119, 1.3, 0.00497, "4 published runs"),
    "GB300": Achieved(0.87, 0.297, 8.13, 1.0, 0.259, 0.00011, 0.216, 1.3, 0.0487, "16 published runs"),
    "GB200": Achieved(0.807, 0.225, 5.77, 1.0, 1.0, 0.00031, 0.244, 1.3, 0.067, "17 published runs"),
    "B200": Achieved(1.0, 0.294, 34.1, 0.911, 1.0, 0.00025, 0.0796, 1.3, 0.00161, "2 published runs"),
}
"""By card: `scripts/bench plan` fits them again from benchmarks/plan/published.json, and shows the errors."""
