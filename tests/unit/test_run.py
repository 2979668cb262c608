"""The face refuses in one sentence what it is given wrongly. One process, no launcher."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.data.loader import Feed, Loader
from shoal.errors import ConfigError
from shoal.train.loop import Goal

LOADER = Loader(Feed(data=list(range(100)), global_batch=10, rank=0, size=1))


def mean_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def settings(**changes: Any) -> dict[str, Any]:
    data = TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
    common = {"model": lambda: nn.Linear(4, 1), "loss": mean_loss, "optimizer": sgd, "data": data}
    return {**common, "global_batch": 8, "log": None, "progress": False, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "net"}, "model= is a str; give an nn.Module or a function of no arguments"),
        ({"model": lambda: 3}, "model= made a int; give an nn.Module or a function"),
        ({"model": nn.Identity()}, "the model has no trainable parameter"),
        ({"optimizer": "adam"}, "optimizer= is a str; give a function of the parameters"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            "optimizer= is a SGD; give a function",
        ),
        ({"optimizer": lambda _: 3}, "optimizer= returned int; give a function of the parameters"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS evaluates the loss many times"),
        ({"loss": 3}, "loss= is a int; give a function (output, batch) -> (sum, count)."),
        ({"inputs": "x"}, "inputs= is a str; give a function."),
        ({"collate": 3}, "collate= is a int; give a function."),
        ({"data": iter([1])}, "it needs len() and [i]"),
        ({"global_batch": 21}, "the data set has 20 samples, fewer than one global_batch of 21"),
        ({"accumulate": 9}, "global_batch=8 cannot be cut into 1 workers × 9 micro-batches = 9 parts"),
        ({"accumulate": 0}, "accumulate=0; it must be at least 1."),
        ({"loader_workers": -1}, "loader_workers=-1; it must be at least 0."),
        ({"strategy": "zero7"}, "unknown exchange 'zero7'; did you mean"),
        ({"strategy": "ddp * tp2"}, "tp2 needs a multiple of 2 workers; you have 1. Use --workers 2."),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"clip": -1}, "clip=-1: the limit must be above 0."),
        ({"on_nan": "ignore"}, "on_nan='ignore'; it is 'stop' or 'skip'."),
        ({"checkpoint_every": 5}, "checkpoint_every=5 needs a folder: give checkpoint=."),
        ({"checkpoint": "x", "checkpoint_every": 0}, "checkpoint_every=0; it must be at least 1."),
    ],
)
def test_wrong_settings(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shoal.Run(**settings(**changes))
    assert words in str(caught.value)


def test_loaders_in_a_folder_that_is_too_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 75)
    with pytest.raises(ConfigError, match=r"path of 76 bytes \(/t+\) .* set TMPDIR to one of at most 75\."):
        shoal.Run(**settings(loader_workers=1))
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 74)
    shoal.Run(**settings(loader_workers=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loss": lambda output, _: output},
            "loss= returned a tensor of shape [8, 1]; return (sum, count)",
        ),
        ({"loss": lambda *_: 0.5}, "loss= returned float; return (sum, count)"),
        ({"loss": lambda output, _: output.sum().detach()}, "does not depend on any trainable parameter"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ({"schedule": lambda _: 3}, "schedule= returned int; give a name"),
        ({"data": [{"x": 1.0}] * 20}, "the batch is a dict with ['x'], without 'inputs'"),
    ],
)
def test_wrong_settings_that_show_in_the_first_step(changes: dict[str, Any], words: str) -> None:
    run = shoal.Run(**settings(**changes))
    with pytest.raises(ConfigError) as caught:
        next(iter(run.steps(3)))
    assert words in str(caught.value)


def override(monkeypatch: pytest.MonkeyPatch, **values: Any) -> shoal.Run:
    monkeypatch.setenv("SHOAL_OVERRIDES", json.dumps(values))
    return shoal.Run(**settings(clip=1.0))


def test_overrides_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    run = override(monkeypatch, clip="none", seed=3, precision="fp64", accumulate=2, shuffle=False, steps=2)
    assert (run.clip, run.seed, run.precision, run.accumulate, run.shuffle) == (None, 3, "fp64", 2, False)
    assert len(list(run.steps(9))) == 2
    assert list(override(monkeypatch, steps=0).steps(9)) == [], "no steps means none"
    assert len(list(override(monkeypatch, steps="2ep").steps(1))) == 6
    assert override(monkeypatch, clip=2).clip == 2.0
    assert override(monkeypatch, log=7, checkpoint="none").config.log == "7"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"global_batch": "big"}, "--set global_batch=big: it should be int."),
        ({"global_batch": 2.5}, "--set global_batch=2.5: it should be int."),
        ({"shuffle": 1}, "shuffle='1'; it is True, False"),
        ({"clipp": 1}, "--set clipp=1: Run has no such setting; did you mean 'clip'?"),
        ({"model": 1}, "--set model=1: Run has no such setting"),
        ({"clip": "vale(3)"}, "unknown clip 'vale'; did you mean 'value'?"),
    ],
)
def test_wrong_overrides(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(monkeypatch, **values)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["-1", -1, "many", "2 ep", "1.5", "ep", True, ""])
def test_wrong_numbers_of_steps(text: int | str) -> None:
    with pytest.raises(ConfigError, match="give a number of steps, as 100, or of epochs, as '2ep'"):
        Goal.of(text, LOADER)


def test_numbers_of_steps() -> None:
    assert [Goal.of(text, LOADER).steps for text in (0, 7, "7", "2ep", "0.5ep")] == [0, 7, 7, 20, 5]


def test_saving_without_a_folder() -> None:
    with pytest.raises(ConfigError, match="there is nowhere to save"):
        shoal.Run(**settings()).save("final")


def test_steps_in_two_loops_are_steps_in_one() -> None:
    changes = {"schedule": "cosine(warmup=2)", "strategy": "solo"}
    data = settings()["data"]
    whole = [(s.number, s.loss, s.lr) for s in shoal.Run(**settings(**changes, data=data)).steps(8)]
    run = shoal.Run(**settings(**changes, data=data))
    parts = []
    for step in run.steps(8):
        parts.append((step.number, step.loss, step.lr))
        if step.number == 3:
            break
    parts += [(s.number, s.loss, s.lr) for s in run.steps(8)]
    assert parts == whole


def test_evaluate_uses_the_collate_of_the_run() -> None:
    rows = [{"row": torch.randn(4)} for _ in range(20)]

    def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.stack([sample["row"] for sample in samples])
        return x, x.sum(1, keepdim=True)

    run = shoal.Run(**settings(data=rows, collate=collate))
    found = run.evaluate(rows[:7], {"nothing": lambda output, _: (output.sum(), 0)}, batch=3)
    x, y = collate(rows[:7])
    with torch.no_grad():
        assert found.loss == pytest.approx(float(mean_loss(run.module(x), (x, y))), rel=1e-6)
    assert found.count == 7
    assert found.metrics["nothing"] != found.metrics["nothing"], "a mean over nothing is not a number"
    for empty in ([], iter([])):
        with pytest.raises(ConfigError):
            run.evaluate(empty)  # type: ignore[arg-type]
