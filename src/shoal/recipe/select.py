"""The k smallest scores among all workers, exactly: the entries that one process would choose, equal scores too.

A threshold per worker chooses other entries than one process does. Here all workers count together: how many scores
begin with each byte, most significant first, until the k-th smallest is known bit by bit. Equal scores at the threshold
are taken in the order of the model: of its parameters, and of the elements in each. What travels is 256 counts for each
byte and each group of scores, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.world.world import World

_BYTES = 8
_VALUES = 256


@dataclass(frozen=True)
class Scored:
    """Scores of elements that are here, each of which counts on one worker alone."""

    group: int
    """Which of the groups, each with a threshold of its own, they are in."""
    scores: torch.Tensor
    """Flat; -inf is chosen first."""
    places: torch.Tensor
    """Flat; where each element is in the model: how equal scores are ordered."""


@dataclass(frozen=True)
class Threshold:
    """What is chosen in one group: keys below `key`, and keys equal to it with a place up to `place`."""

    key: int
    place: int

    def of(self, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Which of these elements are chosen."""
        keys = keys_of(scores)
        return (keys < self.key) | ((keys == self.key) & (places <= self.place))


NOTHING = Threshold(-(2**63), -1)


def keys_of(scores: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the order of the scores.

    >>> keys = keys_of(torch.tensor([-2.0, -0.0, 0.0, 1e-300, 3.0], dtype=torch.float64))
    >>> bool((keys[1:] >= keys[:-1]).all()), bool(keys[1] == keys[2])
    (True, True)
    """
    bits = (scores.to(torch.float64) + 0.0).view(torch.int64)  # + 0.0 makes 0.0 of -0.0
    return bits ^ ((bits >> 63) & (2**63 - 1))


def choose(world: World, scored: Sequence[Scored], counts: Sequence[int]) -> list[Threshold]:
    """For each group what makes its `counts` smallest scores, over all workers. Collective.

    >>> scores, places = torch.tensor([3.0, 1.0, 2.0, 1.0]), torch.arange(4)
    >>> choose(World.alone(), [Scored(0, scores, places)], [1])[0].of(scores, places)
    tensor([False,  True, False, False])
    """
    wanted = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
    keys = [(part.group, keys_of(part.scores)) for part in scored]
    key, left = _smallest(world, keys, wanted)
    ties = [
        (part.group, part.places[mine == int(key[part.group])])
        for part, (_, mine) in zip(scored, keys, strict=True)
    ]
    place, _ = _smallest(world, ties, left)
    found = zip(key.tolist(), place.tolist(), counts, strict=True)
    return [Threshold(int(k), int(p)) if count > 0 else NOTHING for k, p, count in found]


def _smallest(
    world: World, parts: Sequence[tuple[int, torch.Tensor]], wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each group the `wanted`-th smallest number, and how many of those equal to it are among the wanted."""
    prefix = torch.zeros_like(wanted)
    left = wanted.clone()
    parts = list(parts)
    for byte in reversed(range(_BYTES)):
        counts = torch.zeros(len(wanted), _VALUES, dtype=torch.int64, device="cpu")
        digits = []
        for group, numbers in parts:
            digit = (numbers >> (8 * byte)) & 0xFF
            if byte == _BYTES - 1:
                digit = digit ^ 0x80  # the sign: negative numbers come first
            digits.append(digit)
            counts[group] += torch.bincount(digit, minlength=_VALUES).cpu()
        world.all_reduce(counts).wait()
        upto = counts.cumsum(1)
        # The first value up to which there are as many as wanted.
        value = (upto < left.clamp(min=1).unsqueeze(1)).sum(1).clamp(max=_VALUES - 1)
        left = left - (upto - counts).gather(1, value.unsqueeze(1)).squeeze(1)
        digit_of = value ^ 0x80 if byte == _BYTES - 1 else value
        prefix = prefix | (digit_of << (8 * byte))
        parts = [
            (group, numbers[digit == int(value[group])])
            for (group, numbers), digit in zip(parts, digits, strict=True)
        ]
    return prefix, left
