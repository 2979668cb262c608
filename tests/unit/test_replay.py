"""New data with old among it: each new sample once an epoch, old ones in turns, at any number of workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.errors import ConfigError
from shoal.recipe.grow.replay import Replay, ReplayOrder

NUMBERS = torch.arange(30)
OLD, NEW = TensorDataset(NUMBERS[:18].float()[:, None]), TensorDataset(NUMBERS[18:].float()[:, None])


def test_each_new_sample_once_and_old_ones_in_turns() -> None:
    order = ReplayOrder(old=18, new=12, share=0.25, seed=3)
    assert len(order) == 16
    seen: Counter[int] = Counter()
    for epoch in range(9):
        order.set_epoch(epoch)
        ids = list(order)
        assert sorted(i for i in ids if i >= 18) == list(range(18, 30))
        seen.update(i for i in ids if i < 18)
        assert max(seen.values()) - min(seen[i] for i in range(18)) <= 1, "none twice before all came once"
        assert ids != sorted(ids)
    assert sum(seen.values()) == 9 * 4
    without = ReplayOrder(old=18, new=12, share=0.0, seed=3)
    assert sorted(without) == list(range(18, 30)), "a share of 0 trains on nothing old"


def samples(feeds: list[Feed], steps: int) -> list[list[int]]:
    loaders = [Loader(feed) for feed in feeds]
    return [
        [
            int(number)
            for loader in loaders
            for batch in loader.take(step).batches
            if batch is not None
            for number in batch[0]
        ]
        for step in range(steps)
    ]


def test_the_same_samples_at_any_number_of_workers() -> None:
    feed = Replay(0.25).feed(Feed([OLD, NEW], 8, 0, 1, seed=1))
    alone = samples([feed], 6)
    assert sorted(i for i in alone[0] + alone[1] if i >= 18) == list(range(18, 30))
    for size in (2, 3):
        feeds = [Replay(0.25).feed(Feed([OLD, NEW], 8, rank, size, seed=1)) for rank in range(size)]
        assert samples(feeds, 6) == alone
    grown = Replay(0.25, old=18).feed(Feed(TensorDataset(NUMBERS.float()[:, None]), 8, 0, 1, seed=1))
    assert samples([grown], 6) == alone, "one data set that has grown is the same"


def run_on(data: Any, recipes: str, folder: Path) -> shoal.Run:
    return shoal.Run(
        model=lambda: nn.Linear(1, 1),
        loss=lambda output, _batch: (output**2).sum() / len(output),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        data=data,
        global_batch=6,
        strategy="solo",
        recipes=recipes,
        checkpoint=str(folder),
        checkpoint_every=1,
        log=None,
        progress=False,
    )


def test_a_run_goes_on_with_new_data_alone(tmp_path: Path) -> None:
    """Old samples are not trained on again unless replayed, and each new one exactly once, also over a restart."""
    done = run_on(OLD, "", tmp_path)
    assert [step.epoch for step in done.steps("1ep")] == [0, 0, 0]
    whole = TensorDataset(NUMBERS.float()[:, None])
    first = run_on(whole, "replay(0.25, old=18)", tmp_path)
    begun = [int(x) for x in first._context.loader.take(3).batches[0][0]]  # type: ignore[index]
    for step in first.steps("2ep"):
        assert step.number == 4
        break
    del first
    second = run_on(whole, "replay(0.25, old=18)", tmp_path)
    taken = []
    for number in (4, 5):
        taken += [int(x) for x in second._context.loader.take(number).batches[0][0]]  # type: ignore[index]
    rest = list(second.steps("2ep"))
    assert sorted(i for i in begun + taken if i >= 18) == list(range(18, 30))
    assert [step.samples for step in rest] == [6, 4], "16 samples: 6 were done before"


@pytest.mark.parametrize(
    ("recipe", "data", "words"),
    [
        ("replay(1.5)", [OLD, NEW], "share=1.5"),
        ("replay", OLD, "give data=[old, new], or one data set"),
        (
            "replay(0.2, old=30)",
            TensorDataset(NUMBERS.float()[:, None]),
            "30 samples are old and data= is 30 samples",
        ),
    ],
)
def test_mistakes_with_old_data_are_said(recipe: str, data: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        run_on(data, recipe, tmp_path)
    assert words in str(found.value)
