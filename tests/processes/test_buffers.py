"""Buffers that forward passes change: one value where `buffers=` says so, and a word where it does not."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from shoal.errors import ConfigError
from shoal.testing.parity import take_step
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.evaluate import evaluate
from shoal.train.run_config import RunConfig
from shoal.train.state.run_state import collect
from shoal.train.step_context import StepContext
from shoal.world.world import World

STEPS = 5
"""Of eight samples; the third of an epoch has six, which no number of micro-batches here divides."""
WORDS = {"*.ema": "mean", "*.tokens": "sum", "*.steps": "first", "*.live": "first"}


class Book(nn.Module):
    """A layer that computes with what its earlier passes have seen: nothing of it may be off."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("tokens", torch.tensor(0))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("live", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1 + 0.1 * self.steps + 0.01 * self.tokens
        out: torch.Tensor = x + torch.tanh(self.mix(x - self.ema.clone())) * factor * ~self.live
        if self.training:
            with torch.no_grad():
                self.ema.mul_(0.9).add_(0.1 * x.mean(0))
                self.tokens += len(x)
                self.steps = self.steps + 1  # another tensor under the same name
                self.live.fill_(len(x) == 0)
        return out


def books() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), *(Book() for _ in range(4)), nn.Linear(6, 3))


def spectral() -> nn.Module:
    torch.manual_seed(3)
    new, old = parametrizations.spectral_norm, nn.utils.spectral_norm
    return nn.Sequential(
        new(nn.Linear(5, 6)), nn.Tanh(), old(nn.Linear(6, 6)), nn.Tanh(), new(nn.Linear(6, 3))
    )


class Scaler(nn.Module):
    """Remembers its input, and has no weights: every stage of a pipeline could run it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x - self.ema.clone()
        if self.training:
            self.ema.mul_(0.9).add_(0.1 * x.mean(0))
        return out


def scaled() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Scaler(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


class Late(nn.Module):
    """Remembers what lies behind the boundary of two stages, in buffers of the whole model, which runs in both."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last, self.early = nn.Linear(5, 6), nn.Linear(6, 3), early
        self.register_buffer("ema", torch.zeros(3))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1 + self.ema.sum() if self.early else 1
        out: torch.Tensor = self.last(torch.tanh(self.first(x) * factor))
        seen = out.detach().mean(0)
        out = out - self.ema.clone()
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * seen
            self.steps = self.steps + 1
        return out


MODELS = {"books": books, "spectral": spectral, "scaled": scaled, "late": Late}


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(22, n, generator=generator) for n in (5, 3)))


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return ((output - batch[1]) ** 2).sum(), batch[1].numel()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def order(model: str, strategy: str, **settings: Any) -> RunConfig:
    return RunConfig(
        model=MODELS[model](),
        loss=loss,
        optimizer=sgd,
        data=samples(),
        global_batch=8,
        strategy=strategy,
        precision="fp64",
        shuffle=False,
        **settings,
    )


def plain(name: str) -> dict[str, torch.Tensor]:
    """The loop that a user writes, over whole batches."""
    model, data = MODELS[name]().double(), samples()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        start = step % 3 * 8
        batch = tuple(tensor[start : start + 8].double() for tensor in data.tensors)
        total, count = loss(model(batch[0]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return model.state_dict()


def trained(world: World, config: RunConfig) -> StepContext:
    parts = build(config, world, record="")[1]
    for number in range(STEPS):
        take_step(parts, number)
    return parts


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("books", "ddp", {}),
    ("books", "ddp", {"accumulate": 2}),
    ("books", "zero3", {"recompute": "blocks"}),
    ("books", "ddp * pp2(microbatches=2)", {}),
    ("spectral", "zero2", {"accumulate": 2}),
    ("spectral", "ddp * pp2(microbatches=2)", {}),
    ("scaled", "ddp * pp2(microbatches=2)", {"buffers": "mean"}),
    ("late", "ddp * pp2(microbatches=2)", {"buffers": "mean"}),
]


def run_cases(world: World) -> list[dict[str, torch.Tensor]]:
    found = []
    for model, strategy, settings in CASES:
        words = {"buffers": WORDS} if model == "books" else {}
        whole = trained(world, order(model, strategy, **words, **settings)).whole
        tensors = whole.tensors()
        found.append(tensors)
        for holding, kept in collect(whole, {}):  # what a checkpoint holds is what everybody sees
            if holding.path.startswith("buffer/"):
                assert torch.equal(kept, tensors[holding.path.removeprefix("buffer/")]), holding.path
    return found


def test_equals_the_plain_loop() -> None:
    for rank, found in enumerate(spawn(run_cases, 2)):
        for (model, strategy, settings), tensors in zip(CASES, found, strict=True):
            for name, wanted in plain(model).items():
                torch.testing.assert_close(
                    tensors[name],
                    wanted,
                    rtol=1e-12,
                    atol=1e-12,
                    msg=lambda m, w=(rank, strategy, settings, name): f"{w}: {m}",
                )


def divide_late(world: World) -> str:
    asked = replace(order("late", "ddp * pp2(microbatches=2)"), model=Late(early=True))
    with pytest.raises(ConfigError) as refusal:
        build(asked, world, record="")
    return str(refusal.value)


def test_a_buffer_that_two_stages_would_have_is_refused() -> None:
    for said in spawn(divide_late, 2):
        assert said.startswith(
            "the forward pass uses 'ema', a buffer that it changes, both before and after 'last', "
        )


def leave_alone(world: World) -> tuple[str, list[float], list[float], float]:
    said = io.StringIO()
    with redirect_stderr(said):
        parts = trained(
            world, order("books", "ddp", buffers={"*.steps": "own", "*.live": "first", "*.tokens": "sum"})
        )
        mine = parts.model.get_buffer("1.ema")
        before = mine.tolist()
        mean = evaluate(parts, samples(), {}, 8).loss
    return said.getvalue(), before, mine.tolist(), mean


def test_without_a_word_they_stay_apart_and_are_named() -> None:
    (said, before, after, mean), (silent, other, still, same) = spawn(leave_alone, 2)
    assert "forward passes change '1.ema', '2.ema', '3.ema', '4.ema', each worker" in said
    assert """checkpoints and evaluate take rank 0's. Say buffers={"1.ema": "mean"} for the mean""" in said
    assert said.count("\n") == 1, "once, and not again before evaluate"
    assert silent == ""
    assert before != other
    assert (after, still) == (before, other), "evaluate takes rank 0's and gives everybody's own back"
    assert mean == same


def differ_later(world: World) -> str:
    said = io.StringIO()
    with redirect_stderr(said):
        model = nn.Sequential(nn.Linear(5, 3))
        model.register_buffer("stage", torch.tensor(0))
        parts = trained(world, replace(order("books", "ddp"), model=model))
        parts.watch.check("at checkpoint a")
        parts.model.get_buffer("stage").fill_(world.rank)
        parts.watch.check("at checkpoint b")
        parts.watch.check("at checkpoint c")
    return said.getvalue()


def test_a_later_difference_is_named_at_the_next_checkpoint() -> None:
    said, silent = spawn(differ_later, 2)
    assert said.startswith("shoal: at checkpoint b ranks [1] differ from rank 0 in 'stage'; ")
    assert said.count("\n") == 1
    assert silent == ""


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "local(2)"])
def test_alone_they_stay_each_workers_own(strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="workers do not meet at every step, and 'mean' needs them all"):
        build(order("books", strategy, buffers={"*.ema": "mean"}), World.alone(), record="")
    parts = build(order("books", strategy, accumulate=2), World.alone(), record="")[1]
    take_step(parts, 0)
    parts.exchange.close()
    assert "under " + strategy + " each worker's stays its own" in capfd.readouterr().err


def test_a_buffer_that_grows_is_refused() -> None:
    class Growing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x.detach()])
            return super().forward(x)

    model = Growing(5, 3)
    model.register_buffer("seen", torch.zeros(0, 5))
    parts = build(replace(order("books", "ddp", buffers="sum"), model=model), World.alone(), record="")[1]
    with pytest.raises(ConfigError, match=r"'seen' was \[0, 5\] and is \[8, 5\] after a forward pass"):
        take_step(parts, 0)
