"""Toys whose numbers can depend on how many workers there are; all toys are run with three."""

from __future__ import annotations

SIZED = ["unused", "uneven", "accumulated", "dropout"]
"""Gradients on some workers only, sizes that nothing divides and workers without samples, the same clipped and with
micro-batches, and draws. What else toys are made of (ties, frozen layers, blocks) no number of workers changes."""
