"""What samples draw from torch, numpy and `random` depends on epoch and sample, not on who prepares them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from shoal.data.draws import own_generators
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.data.stream import StreamLoader

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "numpy, one normal": lambda: float(np.random.randn()),
    "random": random.random,
    "random, one normal": lambda: random.gauss(0.0, 1.0),
    "all": lambda: float(torch.rand(())) + 10 * np.random.randn() + 100 * random.gauss(0.0, 1.0),
}


class Augmented(Dataset[tuple[int, float]]):
    """Each sample draws; from sample 9 on only, if it is late."""

    def __init__(self, draws: str, late: bool = False) -> None:
        self.draws = draws
        self.late = late

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, 0.0 if self.late and index < 9 else DRAWS[self.draws]()


def found(loader: Loader | StreamLoader, steps: range) -> dict[tuple[int, int], float]:
    """What each sample has drawn, by epoch and sample."""
    table: dict[tuple[int, int], float] = {}
    for step in steps:
        portion = loader.take(step)
        for batch in portion.batches:
            if batch is not None:
                rows = zip(batch[0].tolist(), batch[1].tolist(), strict=True)
                table |= {(portion.epoch, int(i)): value for i, value in rows}
    return table


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sample_draws_the_same_however_steps_are_cut(draws: str, shuffle: bool) -> None:
    for late in (False, True):
        data = Augmented(draws, late)
        truth = found(Loader(Feed(data, 1, 0, 1, shuffle=shuffle)), range(44))
        assert len(set(truth.values())) > 25, "it draws, and another number in another epoch"
        ranks = [Loader(Feed(data, 8, rank, 2, 2, shuffle=shuffle)) for rank in range(2)]
        together: dict[tuple[int, int], float] = {}
        for loader in ranks:
            np.random.rand(3)  # the script draws too
            random.random()
            together |= found(loader, range(6))
        assert together == truth
        state = ranks[0].cursor(4).to_state()
        later = Loader(Feed(data, 5, 0, 1, shuffle=shuffle))
        later.go_on(4, state)
        rest = found(later, range(4, 7))
        assert rest.items() <= truth.items()


def test_loader_processes_draw_the_same() -> None:
    data = Augmented("all", late=True)
    truth = found(Loader(Feed(data, 4, 0, 1)), range(6))
    assert found(Loader(Feed(data, 4, 0, 1, workers=2)), range(6)) == truth


def test_a_script_that_draws_in_between_goes_on_undisturbed() -> None:
    """Its own stream is what it would be if the data set drew nothing."""
    for draws in ("all", "torch"):
        np.random.seed(0)
        random.seed(0)
        wanted = [(np.random.randn(), random.gauss(0.0, 1.0)) for _ in range(5)]
        np.random.seed(0)
        random.seed(0)
        loader = Loader(Feed(Augmented(draws), 4, 0, 1))
        seen = []
        for step in range(5):
            loader.take(step)
            seen.append((np.random.randn(), random.gauss(0.0, 1.0)))
        assert seen == wanted


def test_a_kept_normal_number_of_the_script_is_not_taken_unseen() -> None:
    """numpy draws normal numbers in pairs: the second comes without any change of its words."""
    data = Augmented("numpy, one normal", late=True)
    truth = found(Loader(Feed(data, 1, 0, 1, shuffle=False)), range(22))
    loader = Loader(Feed(data, 1, 0, 1, shuffle=False))
    for step in range(9):
        loader.take(step)
        np.random.randn()
    assert found(loader, range(9, 22)).items() <= truth.items()


def test_collate_draws_by_micro_batch() -> None:
    def noisy(samples: list[Any]) -> torch.Tensor:
        kept = [s.pop("x") for s in samples]  # as collators do: it can only be called once for these samples
        return torch.tensor(kept) + np.random.rand() + random.random() + torch.rand(())

    class Rows(Dataset[dict[str, float]]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> dict[str, float]:
            return {"x": float(index)}

    def batches(size: int, accumulate: int) -> list[list[float]]:
        loaders = [Loader(Feed(Rows(), 4, rank, size, accumulate, collate=noisy)) for rank in range(size)]
        return [[b.tolist() for loader in loaders for b in loader.take(step).batches] for step in range(3)]  # type: ignore[union-attr]

    assert batches(1, 2) == batches(2, 1) == batches(1, 2)


def test_several_samples_at_once_are_drawn_one_by_one() -> None:
    data = Augmented("numpy")

    class Many(Augmented):
        def __getitems__(self, ids: list[int]) -> list[tuple[int, float]]:
            noise = np.random.rand(len(ids))
            return [(i, float(x)) for i, x in zip(ids, noise, strict=True)]

    truth = found(Loader(Feed(data, 4, 0, 1)), range(6))
    assert found(Loader(Feed(Subset(data, range(22)), 4, 0, 1)), range(6)) == truth
    assert found(Loader(Feed(Many("numpy"), 4, 0, 1)), range(6)) == truth


@pytest.mark.parametrize("draws", DRAWS)
def test_streams_draw_the_same(draws: str) -> None:
    class Numbers:
        def __iter__(self) -> Iterator[tuple[int, float]]:
            return ((i, DRAWS[draws]() if i > 5 else 0.0) for i in range(11))

    truth = found(StreamLoader(Feed(Numbers(), 1, 0, 1)), range(22))
    assert len(set(truth.values())) > 8
    both: dict[tuple[int, int], float] = {}
    for rank in range(2):
        random.random()
        both |= found(StreamLoader(Feed(Numbers(), 4, rank, 2)), range(6))
    assert both == truth
    later = StreamLoader(Feed(Numbers(), 4, 0, 1))
    later.go_on(2, StreamLoader(Feed(Numbers(), 4, 0, 1)).cursor(2).to_state())
    assert found(later, range(2, 4)).items() <= truth.items()


def test_generators_of_its_own_are_found() -> None:
    data = Augmented("torch")
    assert own_generators(data) == []
    data.rng = np.random.default_rng(0)  # type: ignore[attr-defined]
    data.transforms = [random.Random(1), 3]  # type: ignore[attr-defined]
    assert own_generators(Subset(data, [1])) == ["Subset.dataset.rng", "Subset.dataset.transforms[0]"]
