"""The parts' mean gradients side by side, each element's values in rising order.

It goes through the vectors in stretches that fit into the processor's cache: nothing as large as all parts together is
ever made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_STRETCH = 16_384
_FEW = 16
"""Up to so many parts a network of exchanges, which goes through whole rows at a time, beats sorting."""


def ranked(parts: Sequence[torch.Tensor], counts: Sequence[float]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Stretches: start, stop, and one row a rank, the lowest first. A value that is not a number ranks highest."""
    size = parts[0].numel()
    divisors = torch.tensor(counts, dtype=parts[0].dtype).unsqueeze(1)
    for start in range(0, size, _STRETCH):
        stop = min(start + _STRETCH, size)
        rows = torch.stack([part[start:stop] for part in parts]).div_(divisors)
        # Comparisons with NaN are false, so it would stay where it is and spoil its neighbours' order.
        rows.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        yield start, stop, _sort(rows)


def _sort(rows: torch.Tensor) -> torch.Tensor:
    if len(rows) > _FEW:
        return torch.sort(rows, dim=0).values
    spare = torch.empty_like(rows[0])
    for turn in range(len(rows)):
        for low in range(turn % 2, len(rows) - 1, 2):
            torch.maximum(rows[low], rows[low + 1], out=spare)
            torch.minimum(rows[low], rows[low + 1], out=rows[low])
            rows[low + 1].copy_(spare)
    return rows
