"""The norm of a gradient that several workers hold between them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.world.devices import fetch
from shoal.world.world import World


def root_of_sum(squares: float, owners: World, model_world: World) -> float:
    """The norm of the whole gradient, from each worker's share of Σ g². Collective; the same float everywhere."""
    # Gathered and added in rank order, not all-reduced: the same float on every rank, whatever the backend.
    rows = owners.gather_numbers([squares])
    whole = sum(rows[:, 0].tolist())
    return float(sum(model_world.gather_numbers([whole])[:, 0].tolist()) ** 0.5)


def sum_of_squares(vectors: Iterable[torch.Tensor]) -> float:
    """Σ v² in double precision over the vectors' own norms."""
    return sum(squares_of(vectors))


def squares_of(vectors: Iterable[torch.Tensor]) -> list[float]:
    """Σ v² of each vector."""
    norms = fetch([torch.linalg.vector_norm(v) for v in vectors])
    return [norm * norm for norm in norms]  # not ** 2, which raises where a product is infinite
