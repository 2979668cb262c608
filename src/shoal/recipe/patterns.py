"""Pruning in patterns that cross the cuts between workers: two of every four, and blocks.

A group of four weights may lie on two workers. So scores come together, one parameter after the other, and every worker
finds the same answer and takes its part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from shoal.recipe.select import Scored
from shoal.world.world import World

PATTERNS = ("unstructured", "2:4", "block")


def chosen_in_pattern(
    pattern: str,
    block: int,
    scope: str,
    level: float,
    sizes: Mapping[str, tuple[int, ...]],
    world: World,
    scored: Sequence[Scored],
    counted: Sequence[bool],
) -> list[torch.Tensor]:
    """Which of the scored elements go; `places` count through `sizes` one after the other. Collective."""
    blocks: list[torch.Tensor] = []
    found = [torch.zeros(part.places.shape, dtype=torch.bool, device=part.places.device) for part in scored]
    offset = 0
    for size in sizes.values():
        numel = math.prod(size)
        whole = torch.zeros(numel, dtype=torch.float64, device="cpu")
        for part, counts in zip(scored, counted, strict=True):
            if counts and part.places.numel() and offset <= int(part.places[0]) < offset + numel:
                whole[part.places.cpu() - offset] = part.scores.cpu()
        world.all_reduce(whole).wait()  # all but one worker add zero, so it is exact
        if pattern == "2:4":
            _take(found, scored, _two_of_four(whole), offset)
        else:
            blocks.append(_block_scores(whole.view(size[0], -1), block))
        offset += numel
    if pattern == "block":
        _take_blocks(found, scored, blocks, block, scope, level, sizes)
    return found


def share_of(level: float, numel: int) -> int:
    """How many of so many a share is, rounded down; a share such as 0.29 is a little less than it says.

    >>> share_of(0.29, 100), int(0.29 * 100)
    (29, 28)
    """
    return math.floor(level * numel + 1e-6)


def _two_of_four(whole: torch.Tensor) -> torch.Tensor:
    """The two smallest of every four; of equal ones the first.

    >>> _two_of_four(torch.tensor([3.0, 1.0, 2.0, 1.0]))
    tensor([False,  True, False,  True])
    """
    fours = whole.view(-1, 4)
    first = fours.argsort(dim=1, stable=True)[:, :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(1, first, True).view(-1)


def _block_scores(matrix: torch.Tensor, block: int) -> torch.Tensor:
    """The mean score of each square; those at the edges may be smaller.

    >>> _block_scores(torch.tensor([[1.0, 3.0, 5.0]]), 2)
    tensor([[2., 5.]], dtype=torch.float64)
    """
    rows, columns = matrix.shape
    pad = (0, -columns % block, 0, -rows % block)
    sums = _squares(F.pad(matrix.double(), pad), block).sum(-1)
    return sums / _squares(F.pad(torch.ones_like(matrix, dtype=torch.float64), pad), block).sum(-1)


def _squares(matrix: torch.Tensor, block: int) -> torch.Tensor:
    rows, columns = matrix.shape
    cut = matrix.view(rows // block, block, columns // block, block).transpose(1, 2)
    return cut.reshape(rows // block, columns // block, -1)


def _take_blocks(
    found: list[torch.Tensor],
    scored: Sequence[Scored],
    blocks: Sequence[torch.Tensor],
    block: int,
    scope: str,
    level: float,
    sizes: Mapping[str, tuple[int, ...]],
) -> None:
    groups = [[scores] for scores in blocks] if scope == "layer" else [list(blocks)]
    gone: list[torch.Tensor] = []
    for group in groups:
        flat = torch.cat([scores.view(-1) for scores in group])
        flags = torch.zeros_like(flat, dtype=torch.bool)
        flags[flat.argsort(stable=True)[: share_of(level, len(flat))]] = True
        cut = torch.split(flags, [scores.numel() for scores in group])
        gone += [part.view(scores.shape) for part, scores in zip(cut, group, strict=True)]
    offset = 0
    for size, flags in zip(sizes.values(), gone, strict=True):
        rows, columns = size[0], math.prod(size[1:])
        wide = flags.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
        _take(found, scored, wide.reshape(-1), offset)
        offset += rows * columns


def _take(found: list[torch.Tensor], scored: Sequence[Scored], whole: torch.Tensor, offset: int) -> None:
    """Each worker's part of what goes of one parameter."""
    for flags, part in zip(found, scored, strict=True):
        if part.places.numel() and offset <= int(part.places[0]) < offset + len(whole):
            flags |= whole[part.places.cpu() - offset].to(flags.device)
