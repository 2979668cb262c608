"""A parameter that is frozen in the middle of a run must be frozen on every worker.

A worker that has frozen it says so in place of "had no gradient", in the all-reduce that ends every step: it costs
nothing, and whoever sums gradients of some workers only would be wrong without a word. Where no such all-reduce is,
workers compare checksums of what they have frozen, where they meet anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

from torch import nn

from shoal.errors import ConfigError
from shoal.world.world import World


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
            raise frozen_here_only(name, not trained[name].requires_grad, workers)


def frozen_here_only(name: str, here: bool, workers: int) -> ConfigError:
    """The sentence for a parameter that is frozen on some workers only."""
    word = "here" if here else "on another worker"
    return ConfigError(
        f"parameter '{name}' is frozen {word} and not on all {workers} workers; call requires_grad_(False) on "
        "every worker before the same step."
    )


def frozen_sum(trained: Mapping[str, nn.Parameter]) -> float:
    """A checksum of what is frozen; 0 for nothing.

    >>> import torch
    >>> frozen_sum({"a": nn.Parameter(torch.zeros(1))})
    0.0
    """
    names = [name for name, parameter in trained.items() if not parameter.requires_grad]
    return float(crc32(" ".join(names).encode())) if names else 0.0


def compare_frozen(world: World, sums: Sequence[float], trained: Mapping[str, nn.Parameter]) -> None:
    """Refuse, from the checksums of all workers, what is frozen on some of them only. Collective where they differ."""
    if len(set(sums)) == 1:
        return
    ranks = world.gather_values([name for name, p in trained.items() if not p.requires_grad])
    for name, parameter in trained.items():
        if len({name in frozen for frozen in ranks}) == 2:
            raise frozen_here_only(name, not parameter.requires_grad, world.size)
