"""A parameter that is frozen in the middle of a run must be frozen on every worker.

A worker that has frozen it says so in place of "had no gradient", in the all-reduce that ends every step: it costs
nothing, and whoever sums gradients of some workers only would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shoal.errors import ConfigError


def mark_frozen(
    used: list[float], names: Sequence[str], trained: Mapping[str, nn.Parameter], workers: int
) -> None:
    """Mark the frozen ones among parameters that had no gradient here.

    >>> import torch
    >>> used = [1.0, 0.0]
    >>> mark_frozen(used, ["a", "b"], {"b": nn.Parameter(torch.zeros(1), requires_grad=False)}, workers=2)
    >>> used
    [1.0, -3.0]
    """
    for index, name in enumerate(names):
        if not used[index] and not trained[name].requires_grad:
            # So low that the sum is negative even if all others had a gradient, and tells how many have frozen it.
            used[index] = -(workers + 1.0)


def check_frozen(
    users: Sequence[float], names: Sequence[str], trained: Mapping[str, nn.Parameter], workers: int
) -> None:
    """Refuse, from the sum over all workers, what is frozen on some of them only."""
    for name, flag in zip(names, users, strict=True):
        if flag < 0 and flag != -(workers + 1.0) * workers:
            word = "here" if not trained[name].requires_grad else "on another worker"
            raise ConfigError(
                f"parameter '{name}' is frozen {word} and not on all {workers} workers; call requires_grad_(False) on "
                "every worker before the same step."
            )
