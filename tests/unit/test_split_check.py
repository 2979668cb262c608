"""What a run says in its first step of a loss that depends on how the batch is cut, and that it changes nothing."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.testing.parity import toy_order, trace_run
from shoal.testing.toys import TABLE as TOYS
from shoal.train.run_config import RunConfig
from shoal.train.technique.split_check import FirstCall, does_not_split
from shoal.world.world import World


def order_of(loss: Any, model: Callable[[], nn.Module] | None = None, **changes: Any) -> RunConfig:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(32, 6, generator=generator)
    labels = torch.randint(0, 4, (32, 3), generator=generator)
    labels[torch.rand(32, 3, generator=generator) < torch.linspace(0, 0.9, 32)[:, None]] = -100
    order = RunConfig(
        model=model or (lambda: nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (3, 4)))),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(x, labels),
        global_batch=16,
        strategy="solo",
        seed=5,
    )
    return replace(order, **changes)


def said(order: RunConfig, capsys: pytest.CaptureFixture[str]) -> str:
    trace_run(World.alone(), order, 2)
    return capsys.readouterr().err


def tokens(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def padded(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    flat = batch[1].flatten()
    total = F.cross_entropy(output.flatten(0, 1), flat, ignore_index=-100, reduction="sum")
    return total, int((flat >= 0).sum())


def simclr(output: torch.Tensor, _: Any) -> torch.Tensor:
    rows = F.normalize(output.flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def pairs(output: torch.Tensor, _: Any) -> tuple[torch.Tensor, int]:
    rows = output.flatten(1)
    return (rows @ rows.T).square().sum(), len(rows)


def forgotten(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().sum()


def half_counted(output: torch.Tensor, _: Any) -> tuple[torch.Tensor, int]:
    return output.square().sum(), 16


class LanguageModel(nn.Module):
    """Gives its own loss back, as those of Hugging Face do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 12), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        logits = self.norm(self.dropout(self.layer(batch[0]))).view(-1, 3, 4)
        return {"loss": tokens(logits, batch), "logits": logits}


WEIGHT = torch.ones(3)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            tokens,
            "a mean over something else than samples, such as tokens that are not padding; return (sum, count)",
        ),
        (simclr, "it compares samples with each other; let it see those of all workers with run.gather"),
        (pairs, "it compares samples with each other; let it see those of all workers with run.gather"),
        (forgotten, "loss= returned a sum without its count: over 16 samples it is "),
        (half_counted, "counts that do not add up: 16 over 16 samples, and 16 and 16 over their halves"),
        (
            lambda output, batch: (padded(output, batch)[0] + WEIGHT.sum(), padded(output, batch)[1]),
            "such as a penalty on the weights; give it as penalty=.",
        ),
    ],
)
def test_a_loss_that_does_not_split_is_said(
    loss: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = said(order_of(loss), capsys)
    assert words in err
    assert err.count("\n") == 1, "one sentence, once"


def test_a_loss_that_the_model_gives_back_is_seen_too(capsys: pytest.CaptureFixture[str]) -> None:
    own = {"inputs": lambda batch: batch, "model": lambda: LanguageModel(0.5)}
    err = said(order_of(lambda output, _: output["loss"], **own), capsys)
    assert "over 16 samples" in err
    assert "such as tokens that are not padding; return (sum, count)" in err
    good = order_of(lambda output, batch: padded(output["logits"], batch), **own)
    assert said(good, capsys) == ""


class DrawingLoss:
    """Noise on the outputs: another loss each time."""

    def __call__(self, output: torch.Tensor, _: Any) -> torch.Tensor:
        return (output + torch.randn_like(output)).square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        padded,
        lambda output, _: output.square().mean(),
        lambda output, _: (
            output.square().mean() + WEIGHT.sum()
        ),  # a penalty in a mean is weighted as samples are
        lambda output, _: output.sum() * 1e-9 / len(output),
        lambda output, _: F.cross_entropy(
            output.flatten(0, 1), torch.zeros(3 * len(output), dtype=torch.int64)
        ),
        lambda output, _: output.view(16, 12).mean(),  # cannot be halved
        DrawingLoss(),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_of_what_splits_nothing_is_said(
    loss: Any, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(order_of(loss, precision=precision), capsys) == ""


def test_micro_batches_of_one_sample_are_looked_at_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone, none of them shows anything: a mean over one sample is that sample's, whatever it is weighted by."""
    assert "over 16 samples it is" in said(order_of(simclr, accumulate=16), capsys)
    assert said(order_of(padded, accumulate=16), capsys) == ""


def test_what_layers_draw_and_normalise_is_not_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    for toy in TOYS:
        trace_run(World.alone(), toy_order(TOYS[toy], "solo"), 1)
    layers = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Unflatten(1, (3, 4)))
    assert said(order_of(padded, lambda: layers), capsys) == ""


class Annealed(nn.Module):
    """Follows its calls: a count, and a mean of outputs that is part of no model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("center", torch.zeros(12))

    def forward(self, output: torch.Tensor, _: Any) -> torch.Tensor:
        self.calls += 1
        flat = output.flatten(1)
        self.center.mul_(0.5).add_(flat.detach().mean(0))
        return (flat - self.center).square().mean() / self.calls


def test_a_loss_that_follows_its_calls_does_not_see_the_look() -> None:
    annealed = Annealed()
    trace_run(World.alone(), order_of(annealed), 3)
    assert annealed.calls == 3


CALLS: dict[str, Any] = {"number": 0, "losses": [], "kinds": Counter()}
NUMBER = 0
MEAN = torch.zeros(())


def noting(output: torch.Tensor) -> None:
    CALLS["losses"].append(float(output.detach().sum()))
    CALLS["kinds"]["seen"] += 1


def counting(closed: list[int], mean: torch.Tensor) -> Any:
    """A function that leaves traces in all the ways there are, and computes with some of them."""
    calls = 0

    def loss(output: torch.Tensor, _: Any, kept: list[int] = []) -> torch.Tensor:  # noqa: B006
        nonlocal calls
        global NUMBER
        calls += 1
        NUMBER += 1
        closed.append(calls)
        kept.append(calls)
        loss.calls = getattr(loss, "calls", 0) + 1  # type: ignore[attr-defined]
        MEAN.add_(1)
        mean.add_(1)
        CALLS["number"] += 1
        noting(output)
        print("called", calls, file=sys.stderr)
        print("called", calls)
        return output.square().mean() / calls

    return loss


def test_a_function_that_counts_its_calls_does_not_see_the_look(capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[int] = []
    mean = torch.zeros(())
    given = counting(closed, mean)
    wanted = [f"called {i}" for i in (1, 2, 3)]
    trace_run(World.alone(), order_of(given), 3)
    out, err = capsys.readouterr()
    assert out.splitlines() == err.splitlines() == wanted
    assert closed == given.__defaults__[0] == [1, 2, 3]
    assert (given.calls, NUMBER, float(mean), float(MEAN), CALLS["number"], len(CALLS["losses"])) == (3,) * 6
    assert CALLS["kinds"]["seen"] == 3


def test_the_look_still_sees_what_a_function_that_counts_computes(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def forgetful(output: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.append(len(output))
        return tokens(output, batch)

    assert "return (sum, count)" in said(order_of(forgetful), capsys)
    assert seen == [16, 16]


class Curious(LanguageModel):
    """Keeps what it has seen outside of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.calls = 0
        self.mean = torch.zeros(6)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        self.calls += 1
        self.seen.append(len(batch[0]))
        self.mean.add_(batch[0].mean(0))
        print("forward")
        return super().forward(batch)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_model_that_counts_its_calls_does_not_see_the_look(
    hooked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model, called = Curious(), []
    if hooked:
        model.layer.register_forward_hook(lambda *_: called.append(1))
    trace_run(
        World.alone(),
        order_of(lambda output, _: output["loss"], model=model, inputs=lambda batch: batch),  # type: ignore[arg-type]
        3,
    )
    assert (model.calls, model.seen) == (3, [16, 16, 16])
    assert capsys.readouterr().out == "forward\n" * 3
    assert called == [1] * 3 * hooked
    x = order_of(padded).data.tensors[0]  # type: ignore[union-attr]
    assert float(model.mean.abs().sum()) > 0
    assert len(x) == 32


class Shaken:
    """Noise of numpy and Python, which no key of a micro-batch reaches."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def __call__(self, output: torch.Tensor, _: Any) -> torch.Tensor:
        self.drawn.append(random.random() + float(np.random.rand()))
        return (output * self.drawn[-1]).square().mean()


def test_generators_stand_as_without_the_look(capsys: pytest.CaptureFixture[str]) -> None:
    random.seed(3)
    np.random.seed(3)
    wanted = [random.random() + float(np.random.rand()) for _ in range(3)]
    random.seed(3)
    np.random.seed(3)
    loss = Shaken()
    trace_run(World.alone(), order_of(loss), 3)
    assert loss.drawn == wanted
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("own", [False, True])
def test_the_run_goes_on_as_if_nobody_had_looked(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one bit of a loss, a parameter, or a statistic differs, with dropout and batch normalisation."""

    def trace() -> tuple[list[float], dict[str, torch.Tensor]]:
        model = LanguageModel(0.5)
        torch.manual_seed(3)
        for p in model.parameters():
            nn.init.normal_(p)
        loss = (
            (lambda output, _: output["loss"])
            if own
            else lambda output, batch: tokens(output["logits"], batch)
        )
        found = trace_run(
            World.alone(), order_of(loss, model=model, inputs=lambda batch: batch, accumulate=2), 4
        )  # type: ignore[arg-type]
        return found.losses, {**found.parameters, **dict(model.named_buffers())}

    looked = trace()
    monkeypatch.setattr("shoal.train.passes.look_at_first", lambda *_: None)
    losses, tensors = trace()
    assert looked[0] == losses
    for name, value in tensors.items():
        assert torch.equal(value, looked[1][name]), name


def test_a_loss_that_has_no_value_over_a_half_is_said() -> None:
    """As a correlation where one half has one value, or a mean over what a half has none of."""
    batch = torch.arange(8.0)
    call = FirstCall(batch, batch, scalar=True)
    assert "depends on how the batch is cut" in does_not_split(
        lambda out, rows: out[rows > 5].mean(), call, None
    )
    assert not does_not_split(lambda out, rows: out[rows > 9].mean(), call, None)
