"""A DataLoader as data: what the hand-written torch loop over it computes, in float64, alone and with two workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import shoal
from shoal.data.dataloader import loader_parts
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.errors import ConfigError
from shoal.testing.parity import ParityTrace, trace_run
from shoal.testing.spawn import spawn
from shoal.train.run_config import RunConfig
from shoal.world.world import World

SAMPLES = 22
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1, keepdim=True).sin()


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Samples that only their own collate can stack."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": X[index], "y": Y[index]}


def stack(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([s["x"] for s in samples]), torch.stack([s["y"] for s in samples])


class Turning(Sampler[int]):
    """Another order in every epoch, with samples that come again and others that do not."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 19

    def __iter__(self) -> Iterator[int]:
        return (((self.epoch + 3) * i) % SAMPLES for i in range(len(self)))


class Growing(Sampler[list[int]]):
    """Batches of 1, 2, 3, … samples."""

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(i * (i - 1) // 2, i * (i + 1) // 2)) for i in range(1, 7))


class Read(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(zip(X, Y, strict=True))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(TensorDataset(X, Y), batch_size=6),
    "collate": lambda: DataLoader(Rows(), batch_size=6, collate_fn=stack),
    "drop_last": lambda: DataLoader(TensorDataset(X, Y), batch_size=6, drop_last=True),
    "sampler": lambda: DataLoader(TensorDataset(X, Y), batch_size=6, sampler=Turning()),
    "sampler, drop_last": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=6, sampler=Turning(), drop_last=True
    ),
    "batch_sampler": lambda: DataLoader(TensorDataset(X, Y), batch_sampler=Growing()),
    "stream": lambda: DataLoader(Read(), batch_size=6),
}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def squares(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return ((output - batch[1]) ** 2).sum(), batch[1].numel()


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain_loop(loader: DataLoader[Any], epochs: int) -> ParityTrace:
    """What a script without Shoal does."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    losses = []
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return ParityTrace(losses, {name: p.detach() for name, p in model.named_parameters()})


def config_of(name: str, strategy: str = "solo") -> RunConfig:
    return RunConfig(
        model=make_model(),
        loss=squares,
        optimizer=make_optimizer,
        data=LOADERS[name](),
        strategy=strategy,
        precision="fp64",
    )


def train_all(world: World, strategy: str, steps: dict[str, int]) -> dict[str, ParityTrace]:
    return {name: trace_run(world, config_of(name, strategy), count) for name, count in steps.items()}


def assert_same(found: ParityTrace, wanted: ParityTrace) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    for name, value in wanted.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-12, atol=1e-13)


def test_the_loop_over_a_dataloader() -> None:
    wanted = {name: plain_loop(make(), 2) for name, make in LOADERS.items()}
    assert [len(trace.losses) for trace in wanted.values()] == [8, 8, 6, 8, 6, 12, 8]
    steps = {name: len(trace.losses) for name, trace in wanted.items()}
    for found in (train_all(World.alone(), "solo", steps), *spawn(train_all, 2, "ddp", steps)):
        for name, trace in wanted.items():
            assert_same(found[name], trace)
    apart = DataLoader(Rows(), batch_size=6, collate_fn=stack, num_workers=1)
    assert_same(trace_run(World.alone(), replace(config_of("collate"), data=apart), 8), wanted["collate"])


def make_run(**changes: Any) -> shoal.Run:
    settings: dict[str, Any] = {
        "model": make_model(),
        "loss": squares,
        "optimizer": make_optimizer,
        "data": DataLoader(TensorDataset(X, Y), batch_size=6),
        "strategy": "solo",
        "precision": "fp64",
        "log": None,
        "progress": False,
    }
    return shoal.Run(**{**settings, **changes})


def test_what_it_means_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    assert capsys.readouterr().err == (
        "shoal: data=DataLoader: its batches of 6 are global batches, divided among all workers.\n"
    )
    assert (run.global_batch, run.shuffle) == (6, False)
    generator = torch.Generator()
    run = make_run(
        data=DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True, generator=generator, timeout=0),
        global_batch=4,
    )
    assert (run.global_batch, run.shuffle, run.sampler) == (4, True, None)
    assert capsys.readouterr().err == (
        "shoal: data=DataLoader: global_batch=4 replaces its batch_size=6.\n"
        "shoal: data=DataLoader: not kept: generator (the order follows from seed=).\n"
    )
    make_run(data=DataLoader(Read(), batch_size=6, num_workers=1, drop_last=True, timeout=5))
    assert "not kept: timeout=5, num_workers=1 (every worker reads" in capsys.readouterr().err


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Any) -> None:
    for loader in (
        lambda: DataLoader(TensorDataset(X, Y), batch_size=6, sampler=RandomSampler(X, replacement=True)),
        lambda: DataLoader(
            TensorDataset(X, Y), batch_size=6, sampler=WeightedRandomSampler(list(range(1, SAMPLES + 1)), 40)
        ),
        lambda: DataLoader(TensorDataset(X, Y), batch_sampler=Growing()),
    ):
        whole = [step.loss for step in make_run(data=loader()).steps(15)]
        folder = str(tmp_path / str(len(list(tmp_path.iterdir()))))
        first = [
            step.loss for step in make_run(data=loader(), checkpoint=folder, checkpoint_every=9).steps(9)
        ]
        torch.rand(3)  # where the script's generators stand does not matter
        rest = [
            step.loss for step in make_run(data=loader(), checkpoint=folder, checkpoint_every=9).steps(15)
        ]
        assert first + rest == whole


def test_a_sampler_draws_the_same_for_all_and_its_repeated_samples_draw_anew() -> None:
    class Noisy(Dataset[tuple[int, float]]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[int, float]:
            return index, float(np.random.rand())

    def drawn(rank: int, size: int, workers: int = 0) -> list[tuple[int, float]]:
        sampler = RandomSampler(range(6), replacement=True, num_samples=20)
        loader = Loader(Feed(Noisy(), 4, rank, size, sampler=sampler, workers=workers, seed=3))
        portions = [loader.take(step) for step in range(10)]
        return [
            (int(i), float(x))
            for p in portions
            for b in p.batches
            if b is not None
            for i, x in zip(*b, strict=True)
        ]

    before = torch.get_rng_state()
    alone = drawn(0, 1)
    assert torch.equal(torch.get_rng_state(), before) is False  # a step sets it; a sampler does not
    assert len({x for _, x in alone}) == 40, "a sample that comes again draws again"
    assert sorted(drawn(0, 2) + drawn(1, 2)) == sorted(alone)
    assert drawn(0, 1, workers=1) == alone


def test_evaluate_takes_one() -> None:
    run = make_run()
    metrics = {"largest": lambda _, batch: (batch[0].abs().sum(), len(batch[0]))}
    wanted = run.evaluate(TensorDataset(X, Y), metrics)
    for loader in (
        DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True),
        DataLoader(Rows(), batch_size=5, collate_fn=stack, num_workers=1),
    ):
        found = run.evaluate(loader, metrics)
        assert (found.loss, found.count) == (pytest.approx(wanted.loss, rel=1e-12), wanted.count)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-12)
    some = run.evaluate(DataLoader(TensorDataset(X, Y), batch_size=5, sampler=range(3, 9), drop_last=True))
    part = run.evaluate(TensorDataset(X[3:8], Y[3:8]))
    assert (some.loss, some.count) == (pytest.approx(part.loss, rel=1e-12), 5)
    with pytest.raises(ConfigError, match="evaluate takes data with len"):
        run.evaluate(DataLoader(Read(), batch_size=5))


class Loud(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Forgetful(Sampler[int]):
    """Its state goes on from one epoch to the next."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(SAMPLES).tolist())


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Batches:
    """A loader of batches that is none of torch's."""

    dataset = None
    batch_size = 4

    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": Loud(TensorDataset(X, Y))}, "a DataLoader with an iter\\(\\) of its own"),
        ({"data": DataLoader(TensorDataset(X, Y), batch_size=None)}, "a DataLoader with batch_size=None"),
        (
            {"data": DataLoader(TensorDataset(X, Y), sampler=DistributedSampler(X, 2, 0))},
            "a DataLoader with a DistributedSampler, which divides samples",
        ),
        ({"data": DataLoader(TensorDataset(X, Y), sampler=Forgetful())}, "gave another order when the same"),
        ({"data": DataLoader(TensorDataset(X, Y), sampler=Endless())}, "and to end it"),
        (
            {"data": DataLoader(TensorDataset(X, Y), sampler=[1, 99])},
            "gave sample 99, and the data set has 22",
        ),
        ({"data": DataLoader(TensorDataset(X, Y), sampler=[1, "a"])}, "gave 'a'; it has to give numbers"),
        ({"data": DataLoader(TensorDataset(X, Y), batch_sampler=[1, 2])}, "it has to give lists of numbers"),
        (
            {"data": DataLoader(TensorDataset(X, Y), batch_sampler=Growing()), "global_batch": 4},
            "global_batch=4 beside a DataLoader whose batch_sampler= makes batches",
        ),
        ({"sampler": [1]}, "sampler= beside a DataLoader"),
        ({"data": Rows(), "global_batch": 4, "sampler": 3}, "sampler= is a int; give an object"),
        ({"data": Batches(), "global_batch": 4}, "data= is a Batches, which gives batches"),
        ({"data": TensorDataset(X, Y)}, "global_batch= is missing: how many samples"),
        (
            {"data": DataLoader(TensorDataset(X, Y), sampler=[1, 2]), "partition": "bucket(id)"},
            "the partition sorts the order of samples by length, and a sampler gives one",
        ),
        (
            {"data": DataLoader(TensorDataset(X, Y), batch_size=6, sampler=[1, 2], drop_last=True)},
            "has no full batch of 6, and drop_last leaves out",
        ),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        next(make_run(**changes).steps(1))


def test_batches_as_data_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(data=list(DataLoader(TensorDataset(X, Y[:, 0]), batch_size=6)), global_batch=2)
    assert "data[0] looks like a batch: its tensors have 6 rows each." in capsys.readouterr().err
    make_run(data=[(x, y) for x, y in zip(X, Y[:, 0], strict=True)], global_batch=2)
    assert capsys.readouterr().err == ""


def disagree(world: World) -> str:
    sampler = [0, 1, 2] if world.rank == 0 else [0, 2, 1]
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, sampler=sampler)
    with pytest.raises(ConfigError) as caught:
        trace_run(
            world, RunConfig(model=make_model(), loss=squares, optimizer=make_optimizer, data=loader), 1
        )
    return str(caught.value)


def test_ranks_with_other_orders_are_refused() -> None:
    for sentence in spawn(disagree, 2):
        assert sentence.startswith("the sampler list gave rank 1 another order than rank 0")


def test_processes_are_started_as_the_loader_says() -> None:
    parts = loader_parts(DataLoader(Rows(), num_workers=1, worker_init_fn=print, pin_memory=True), seed=0)
    assert (parts.workers, parts.worker_init, parts.pin_memory) == (1, print, True)
