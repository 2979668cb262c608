"""augment= as loaders and runs use it: the same samples at any number of workers, and never in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data.augment import make_chain
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.data.stream import StreamLoader
from shoal.errors import ConfigError
from shoal.partition import make_partition
from shoal.testing.parity import trace_run
from shoal.testing.spawn import spawn
from shoal.train.run_config import RunConfig
from shoal.world.world import World

SAMPLES = 22
IMAGES = torch.rand(SAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(0))
NUMBERS = torch.arange(SAMPLES)
CHAINS: list[Any] = ["affine(10) & flip & noise(0.1)", "crop(1) & mixup(0.4, classes=22) & erase(0.2)"]


def jitter(sample: Any, rng: np.random.Generator) -> Any:
    """A function of the user's."""
    image, number = sample
    return image * rng.uniform(0.5, 1.5), number


class Drawing:
    """Samples one at a time, which draw from a global generator too."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return IMAGES[index] + float(torch.rand(())), index


class Together(Drawing):
    """torch's protocol for several at once."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [(IMAGES[i], i) for i in ids]


class Rows:
    """A stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(IMAGES[i], i) for i in range(SAMPLES)])


def seen(loaders: list[Loader | StreamLoader], steps: range) -> dict[tuple[int, int], torch.Tensor]:
    """Each sample's image by epoch and number; of a mixture, whose main number its label says, all of the label."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for step in steps:
        for loader in loaders:
            portion = loader.take(step)
            for batch in portion.batches:
                if batch is None:
                    continue
                for image, label in zip(*batch, strict=True):
                    number = int(label) if label.dim() == 0 else -1 - hash(tuple(label.tolist())) % 2**40
                    assert (portion.epoch, number) not in found, "each sample once"
                    found[portion.epoch, number] = image
    return found


def same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(image, other[key]) for key, image in one.items())


@pytest.mark.parametrize("asked", [*CHAINS, [jitter, "flip"], [jitter, *CHAINS]])
@pytest.mark.parametrize("data", [TensorDataset(IMAGES, NUMBERS), Drawing(), Together()])
def test_a_sample_is_the_same_however_steps_are_cut(data: Any, asked: Any) -> None:
    chain = make_chain(asked)
    truth = seen([Loader(Feed(data, 8, 0, 1, augment=chain))], range(6))
    assert len(truth) == 2 * SAMPLES
    plain = Loader(Feed(data, 8, 0, 1)).take(0).batches[0][0]
    assert not torch.equal(plain, Loader(Feed(data, 8, 0, 1, augment=chain)).take(0).batches[0][0])
    for size, accumulate, partition in ((2, 1, "hash(id)"), (3, 2, "block")):
        feeds = [
            Feed(data, 8, r, size, accumulate, partition=make_partition(partition), augment=chain)
            for r in range(size)
        ]
        assert same(seen([Loader(feed) for feed in feeds], range(6)), truth)
    state = Loader(Feed(data, 8, 0, 1, augment=chain)).cursor(4).to_state()
    later = Loader(Feed(data, 8, 0, 1, augment=chain))
    later.go_on(4, state)
    rest = seen([later], range(4, 6))
    assert rest
    assert all(torch.equal(image, truth[key]) for key, image in rest.items())


def test_loader_processes_give_the_same() -> None:
    chain = make_chain([jitter, CHAINS[1]])
    truth = seen([Loader(Feed(Drawing(), 8, 0, 1, augment=chain))], range(4))
    assert same(seen([Loader(Feed(Drawing(), 8, 0, 1, workers=2, augment=chain))], range(4)), truth)


@pytest.mark.parametrize("asked", [CHAINS[0], [jitter, CHAINS[1]]])
def test_streams(asked: Any) -> None:
    """A sample's number is its place in the epoch, so the stream gives what the data set gives in its order."""
    chain = make_chain(asked)
    truth = seen([Loader(Feed(Together(), 8, 0, 1, shuffle=False, augment=chain))], range(6))
    assert same(seen([StreamLoader(Feed(Rows(), 8, 0, 1, augment=chain))], range(6)), truth)
    halves = [StreamLoader(Feed(Rows(), 8, rank, 2, augment=chain)) for rank in range(2)]
    assert same(seen(halves, range(6)), truth)


def test_a_store(tmp_path: Path) -> None:
    """Rows that a store gathers whole batches of."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow: stores need it")
    from shoal.data.store.store import Store

    rows = pyarrow.FixedSizeListArray.from_arrays(IMAGES.flatten().numpy(), 36)
    table = pyarrow.table({"inputs": rows, "labels": NUMBERS.numpy()})
    chain = make_chain("noise(0.1) & mixup(0.4, classes=22)")
    samples = [{"inputs": image.flatten(), "labels": i} for i, image in enumerate(IMAGES)]
    truth: Any = Loader(Feed(samples, 8, 0, 1, augment=chain)).take(0).batches[0]
    store = Store.write(tmp_path / "store", table)
    for rank in range(2):
        stored: Any = Loader(Feed(store, 8, rank, 2, augment=chain)).take(0).batches[0]
        for name in ("inputs", "labels"):
            assert torch.equal(stored[name], truth[name][4 * rank : 4 * rank + 4])


def soft(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, SAMPLES)),
        "loss": soft,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": TensorDataset(IMAGES, NUMBERS),
        "global_batch": 8,
        "augment": CHAINS[1],
        "log": None,
        "progress": False,
        "strategy": "solo",
        "precision": "fp64",
        **changes,
    }


def make_run(**changes: Any) -> shoal.Run:
    return shoal.Run(**settings(**changes))


def losses_of(world: World, strategy: str) -> list[float]:
    return list(trace_run(world, RunConfig(**settings(strategy=strategy)), 5).losses)


@pytest.mark.parametrize(("workers", "strategy"), [(2, "zero3"), (3, "ddp")])
def test_a_run_is_the_same_on_any_number_of_workers(workers: int, strategy: str) -> None:
    alone = losses_of(World.alone(), "solo")
    assert alone != [step.loss for step in make_run(augment="").steps(5)]
    for found in spawn(losses_of, workers, strategy):
        assert found == pytest.approx(alone, rel=1e-12)


def test_evaluation_sees_samples_as_they_are() -> None:
    data = TensorDataset(IMAGES, NUMBERS)
    for given in (data, DataLoader(data, batch_size=5)):
        with_it, without = make_run(), make_run(augment="")
        assert with_it.evaluate(given).loss == without.evaluate(given).loss


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"augment": "flap"}, "unknown augmentation 'flap'; did you mean 'flip'"),
        ({"augment": "flip(2)"}, "augment: flip has p=2; it is from 0 to 1"),
        ({"augment": "mixup & cutmix"}, "mixup and cutmix both mix samples"),
        ({"augment": ["flip", jitter]}, "jitter stands behind flip; functions see single samples"),
        ({"augment": 3}, "augment= is a int; give a text"),
        ({"augment": "mixup"}, "say how many there are, as in mixup(classes=10)"),
        ({"augment": "mixup(classes=3)"}, "mixup has classes=3, and labels of shape [8] are"),
        (
            {"augment": "swap"},
            "swap is for token ids, n × length, of whole numbers; this part of the batch is",
        ),
        ({"augment": "mask(token=3)"}, "mask is for token ids"),
        ({"augment": "flip(field=7)"}, "flip looks for part 7 of the batch, which has 2 parts"),
        ({"augment": "mask(keep=a)"}, "mask has keep=a; give numbers of tokens"),
    ],
)
def test_what_cannot_work_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        next(iter(make_run(**changes).steps(1)))
    assert words in str(found.value)


def test_a_function_that_fails_names_its_sample() -> None:
    def breaks(_sample: Any, _rng: np.random.Generator) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as found:
        next(iter(make_run(augment=breaks).steps(1)))
    assert any("this was in augment= of data[" in note for note in found.value.__notes__)
