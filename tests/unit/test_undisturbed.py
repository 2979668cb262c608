"""Trial passes over a model leave no trace on it: `undisturbed`."""

from __future__ import annotations

import torch
from torch import nn

from shoal.pipeline.spine import undisturbed


class Counting(nn.Module):
    def __init__(self, seen: list[int], sums: torch.Tensor) -> None:
        super().__init__()
        self.seen = seen
        self.sums = sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        self.sums += x.sum()
        return x


def test_what_modules_share_is_shared_afterwards_too() -> None:
    seen: list[int] = []
    sums = torch.zeros(())
    model = nn.Sequential(Counting(seen, sums), Counting(seen, sums))
    with undisturbed(model) as put_back:
        model(torch.ones(3))
        put_back()
        model(torch.ones(3))
    assert seen == []
    assert sums.item() == 0
    assert all(one.seen is seen and one.sums is sums for one in model)


def test_one_number_that_stands_for_many_takes_no_memory() -> None:
    model = nn.Module()
    model.place = torch.full((), torch.nan).expand(1000, 1000)
    with undisturbed(model):
        assert model.place.untyped_storage().nbytes() == 4
    assert model.place.untyped_storage().nbytes() == 4
