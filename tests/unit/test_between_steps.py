"""What a user may do with a run between two steps, in one process: every promise and every refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint.folder import open_folder
from shoal.errors import ConfigError
from shoal.recipe.averages import Averages, Ema, Swa, make_average
from shoal.report.events import read_events
from shoal.train.technique.early_stop import EarlyStop
from shoal.types import StepReport


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 1, generator=generator))


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), len(batch[1])


def make(**changes: Any) -> shoal.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "data": data(),
        "global_batch": 8,  # three steps an epoch
        "strategy": "ddp",
        "progress": False,
        "log": None,
    }
    return shoal.Run(**{**settings, **changes})


def plateau(made: torch.optim.Optimizer) -> lrs.LRScheduler:
    return lrs.ReduceLROnPlateau(made, factor=0.5, patience=0)


# Schedules


def test_a_schedule_moves_after_each_epoch() -> None:
    run = make(schedule="exponential(0.5)", schedule_every="epoch")
    assert [s.lr for s in run.steps("3ep")] == [0.1] * 3 + [0.05] * 3 + [0.025] * 3
    run = make(schedule="cosine", schedule_every="epoch")
    assert [s.lr for s in run.steps(7)] == pytest.approx([0.1] * 3 + [0.075] * 3 + [0.025]), "of three epochs"
    run = make(schedule=lambda o: lrs.StepLR(o, 2, 0.1))
    assert [s.lr for s in run.steps(3)] == pytest.approx([0.1, 0.1, 0.01]), "without a word, after each step"


@pytest.mark.parametrize("schedule", [plateau, "plateau(factor=0.5, patience=0)"])
def test_a_plateau_follows_the_users_metric(schedule: Any) -> None:
    run = make(schedule=schedule, schedule_every="call")
    found = []
    for step in run.steps(6):
        found.append(step.lr)
        if step.number % 2 == 0:
            run.schedule_step(1.0 if step.number < 4 else 2.0)
    assert found == [0.1] * 4 + [0.05] * 2


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    def some(folder: str, stop: int) -> list[tuple[float, float, float]]:
        run = make(
            schedule=plateau,
            ema=0.8,
            early_stop="value, patience=9",
            checkpoint=str(tmp_path / folder),
            checkpoint_every=2,
            checkpoint_keep=None,
        )
        seen = []
        for step in run.steps(8):
            seen.append((step.loss, step.lr, run.evaluate(data(), weights="ema").loss))
            run.schedule_step([3.0, 2.0, 5.0, 5.0, 1.0, 5.0, 5.0, 5.0][step.number - 1])
            run.log({"value": 1.0})
            if step.number == stop:
                break
        return seen

    whole = some("whole", 99)
    first, rest = some("cut", 5), some("cut", 99)
    assert first[:4] + rest == whole
    assert len({lr for _, lr, _ in whole}) > 2
    states = [open_folder(tmp_path / f / "step-8").manifest for f in ("whole", "cut")]
    early = [state.state["early_stop"] for state in states if state is not None]
    assert early[0] == early[1]
    assert early[0]["worse"] == 7, "the last value is in the last checkpoint"


def test_rates_set_by_hand_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(checkpoint=str(tmp_path), checkpoint_every=2)
    assert isinstance(run.optimizer, torch.optim.SGD)
    for step in run.steps(2):
        if step.number == 2:
            run.optimizer.param_groups[0]["lr"] = 0.3
    again = make(checkpoint=str(tmp_path), checkpoint_every=2)
    assert [s.lr for s in again.steps(4)] == [0.3, 0.3]
    assert "learning rates are those that were set by run.optimizer" in capsys.readouterr().err


REFUSED: list[tuple[dict[str, Any], Callable[[shoal.Run], Any], str]] = [
    (
        {"schedule_every": "hour", "schedule": plateau},
        list,
        "schedule_every='hour'; it is 'step', 'epoch' or 'call'",
    ),
    ({"schedule_every": "epoch"}, list, "schedule_every='epoch' without a schedule"),
    ({"schedule_every": "epoch", "schedule": plateau}, list, "with a plateau: it follows a number"),
    ({"schedule_every": "call", "schedule": "cosine"}, list, "nobody knows how often run.schedule_step"),
    ({}, lambda run: run.schedule_step(1.0), "there is no schedule to move; give Run schedule="),
    ({"schedule": plateau}, lambda _: make(schedule=plateau).schedule_step(1.0), "call it after a step"),
    ({"schedule": plateau}, lambda run: run.schedule_step(), "ReduceLROnPlateau follows a number; give it"),
    ({"schedule": "step(1)"}, lambda run: run.schedule_step(), "StepLR moves after each step by itself"),
    (
        {"schedule": "step(1)", "schedule_every": "call"},
        lambda run: run.schedule_step(1.0),
        "StepLR follows no number; call run.schedule_step()",
    ),
    ({"schedule": plateau}, lambda run: run.schedule_step("low"), "takes a number, and 'low' is a str"),
    ({"ema": 1.0}, list, "ema: decay=1, every=1; a decay is from 0 to below 1"),
    ({"ema": "swa(start=0)"}, list, "swa: start=0, every=1; both are at least 1"),
    ({"ema": "mean"}, list, "unknown average 'mean'"),
    ({"ema": 0.9, "strategy": "local(4)"}, list, "ema=ema: each worker trains alone between two meetings"),
    ({}, lambda run: run.evaluate(data(), weights="ema"), "weights='ema': this run keeps no average"),
    ({"ema": 0.9}, lambda run: run.state_dict(weights="swa"), "weights='swa': this run keeps ema"),
    ({"metrics": {"loss": loss}}, list, "give names other than 'loss'"),
    ({"metrics": [loss]}, list, "metrics= is a list; give a dict"),
    ({"metrics": {"a": lambda *_: "no"}}, list, "a metric returned str; return (sum, count)"),
    ({"early_stop": "loss, patience=0"}, list, "patience is at least 1"),
    ({"early_stop": "loss, mode=down"}, list, "early_stop: mode='down'; it is 'min' or 'max'"),
    ({}, lambda run: run.log({"a": [1]}), "run.log: 'a' is list; give names with numbers or text"),
    ({}, lambda run: run.log({"a": 1}, reduce="max"), "run.log: reduce='max'; it is 'none', 'mean' or 'sum'"),
    ({}, lambda run: run.log({"a": "b"}, reduce="sum"), "give numbers, and the same names on every rank"),
    ({}, lambda run: run.best("a", 1.0), "run.best needs a folder to save in"),
    ({}, lambda run: run.best("a", 1.0, mode="up"), "run.best: mode='up'; it is 'min' or 'max'"),
    ({}, lambda run: run.gradients(3).__enter__(), "run.gradients takes a function of the gradients"),
    ({}, lambda run: twice(run), "one function sees gradients already"),
]


def twice(run: shoal.Run) -> None:
    with run.gradients(print), run.gradients(print):
        pass


@pytest.mark.parametrize(("changes", "act", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_cannot_be_is_refused(changes: dict[str, Any], act: Callable[[Any], Any], words: str) -> None:
    def try_it() -> None:
        run = make(**changes)
        for _ in run.steps(1):
            if act is not list:
                act(run)

    with pytest.raises(ConfigError) as caught:
        try_it()
    assert words in str(caught.value)


# Averages


def test_averages_by_name() -> None:
    assert make_average(None) is None
    assert make_average("ema(0.9, every=5, warmup=true)") == Ema(0.9, 5, True)
    assert [Ema(0.9, every=2).weight(step, 0) for step in (1, 2)] == [0.0, pytest.approx(0.1)]
    assert Ema(0.9, warmup=True).weight(1, 0) == pytest.approx(0.9)
    assert [Swa(3, 2).weight(step, 1) for step in (2, 3, 4, 5)] == [0.0, 0.5, 0.0, 0.5]


def test_an_average_begins_with_the_weights_of_a_run_that_had_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list(make(checkpoint=str(tmp_path), checkpoint_every=2).steps(2))
    run = make(checkpoint=str(tmp_path), checkpoint_every=2, ema=0.5)
    assert "it has no ema, which begins with the weights as they are now" in capsys.readouterr().err
    now, average = run.state_dict(), run.state_dict(weights="ema")
    assert all(torch.equal(now[name], average[name]) for name in now)
    list(run.steps(3))
    after, average = run.state_dict(), run.state_dict(weights="ema")
    torch.testing.assert_close(average["0.weight"], (now["0.weight"] + after["0.weight"]) / 2)
    assert torch.equal(average["1.running_mean"], after["1.running_mean"]), "buffers are the model's own"


def test_an_average_of_half_precision_weights_is_kept_in_single() -> None:
    run = make(
        model=nn.Linear(4, 1).bfloat16(), data=TensorDataset(*(t.bfloat16() for t in data().tensors)), ema=0.9
    )
    list(run.steps(2))
    averages = run._context.recipes.averages
    assert isinstance(averages, Averages)
    assert {extra.held.tensor.dtype for extra in averages.extras()} == {torch.float32}
    assert run.state_dict(weights="ema")["weight"].dtype == torch.bfloat16


def test_what_is_shown_of_an_average_leaves_the_model_as_it_was() -> None:
    run = make(ema=0.5)
    list(run.steps(2))
    before = run.state_dict()

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.evaluate(data(), {"broken": fail}, weights="ema")
    assert all(torch.equal(value, before[name]) for name, value in run.state_dict().items())


# Metrics, the log, the best, early stop


def size(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.abs().sum(), len(batch[1])


def test_metrics_cover_the_step_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for accumulate in (1, 3):  # the last step of an epoch has four samples
        run = make(
            model=lambda: nn.Linear(4, 1),
            metrics={"size": size},
            accumulate=accumulate,
            log=str(tmp_path),
            progress=True,
        )
        for step in run.steps(3):
            run.evaluate(data())
            seen = step.metrics["size"]
        assert seen > 0
    ends = [
        event["metrics"]["size"] for event in read_events(tmp_path / "events.jsonl") if event.get("step") == 3
    ]
    assert ends[0] == pytest.approx(ends[1])
    assert f"size {seen:.4g}" in capsys.readouterr().out


def test_the_log(tmp_path: Path) -> None:
    run = make(log=str(tmp_path))
    run.log({"before": 1})
    for step in run.steps(2):
        written = run.log({"a": torch.tensor(step.number), "b": float("nan"), "text": "x"})
        assert written["a"] == step.number
    assert run.log({"after": 2}, reduce="mean") == {"after": 2.0}
    kept = [
        (e["after"], e["values"]) for e in read_events(tmp_path / "events.jsonl") if e.get("event") == "log"
    ]
    assert kept == [
        (0, {"before": 1}),
        (1, {"a": 1, "b": None, "text": "x"}),
        (2, {"a": 2, "b": None, "text": "x"}),
        (2, {"after": 2.0}),
    ]


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    values = [5.0, 3.0, float("nan"), 4.0, 2.0, 2.0]

    def some(stop: int) -> list[bool]:
        run = make(checkpoint=str(tmp_path), checkpoint_every=1, checkpoint_keep=1)
        return [run.best("val", values[step.number - 1]) for step in run.steps(stop)]

    assert some(3) == [True, True, False]
    assert best(tmp_path) == (2, 3.0)
    assert some(6) == [False, True, False], "a run that goes on knows the best value"
    assert best(tmp_path) == (5, 2.0)
    with pytest.raises(ConfigError, match="the checkpoint best is the best by 'val'"):
        make(checkpoint=str(tmp_path)).best("acc", 0.5, mode="max")


def best(folder: Path) -> tuple[int, float]:
    manifest = open_folder(folder / "best").manifest
    assert manifest is not None
    return manifest.step, manifest.state["best"]["value"]


def test_early_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def some() -> list[StepReport]:
        run = make(checkpoint=str(tmp_path), checkpoint_every=3, early_stop="acc, patience=2, mode=max")
        seen = []
        for step in run.steps(20):
            seen.append(step)
            value = min(step.number, 3)
            run.log({"acc": value})
            run.best("acc", value, mode="max")  # the same value of the same step counts once
        return seen

    assert [step.number for step in some()] == [1, 2, 3, 4, 5]
    assert "early stop after step 5: acc has not been above 3 for 2 values" in capsys.readouterr().err
    assert open_folder(tmp_path / "step-5").manifest is not None, "the last step is saved"
    assert some() == []
    said = capsys.readouterr().err
    assert "nothing left to do: the run has stopped early after step 5: acc has not been above 3" in said
    assert EarlyStop.of(None) is None


@pytest.mark.parametrize("how", ["log", "best", "schedule_step"])
def test_what_comes_before_a_break_counts(how: str, tmp_path: Path) -> None:
    """A run that ends with `break` in the body goes on as if it had not been stopped."""

    def some(folder: str, stop: int) -> list[tuple[int, float]]:
        run = make(
            checkpoint=str(tmp_path / folder),
            checkpoint_every=2,
            early_stop="val, patience=3",
            schedule=plateau,
            schedule_every="call",
        )
        seen = []
        for step in run.steps(10):
            seen.append((step.number, step.lr))
            if how == "log":
                run.log({"val": 1.0})
            elif how == "best":
                run.best("val", 1.0)
            else:
                run.schedule_step(1.0)
            if step.number == stop:
                break
        return seen

    whole = some("whole", 99)
    for stop in (2, 4):
        parts = some(f"parts{stop}", stop)
        assert parts + some(f"parts{stop}", 99) == whole
    if how != "schedule_step":
        assert len(whole) == 4
        assert some("parts4", 99) == []


def test_what_was_asked_for_and_never_happened_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(schedule=plateau, early_stop="val", checkpoint=str(tmp_path), checkpoint_every=9)
    list(run.steps(2))
    said = capsys.readouterr().err
    assert "the learning rate has not moved: ReduceLROnPlateau waits for run.schedule_step" in said
    assert "early_stop: no value of 'val' has come; give it, as run.log({'val': value})" in said
    assert list(run.steps(2)) == []
    assert "nothing left to do: 2 steps are done, and 2 were asked for" in capsys.readouterr().err


# Gradients, and the module


def test_gradients_are_means_and_can_be_changed() -> None:
    def clear(gradients: Any) -> None:
        seen.append({name: gradient.clone() for name, gradient in gradients.items()})
        gradients["2.bias"].zero_()

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    by_hand = copy.deepcopy(model)
    seen: list[dict[str, torch.Tensor]] = []
    run = make(model=model, shuffle=False, accumulate=2)
    with run.gradients(clear):
        first = next(iter(run.steps(1)))
    total, count = loss(by_hand(data().tensors[0][:8]), [None, data().tensors[1][:8]])
    (total / count).backward()
    assert first.number == 1
    assert seen[0].keys() == {name for name, _ in by_hand.named_parameters()}
    for name, p in by_hand.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(seen[0][name], p.grad)
    assert torch.equal(run.state_dict()["2.bias"], by_hand[2].bias), "its gradient was cleared"
    list(run.steps(2))
    assert len(seen) == 1, "and then nobody looks"


def test_the_module_may_be_used_before_the_first_step() -> None:
    wanted = [step.loss for step in make(model=dropping).steps(3)]
    run = make(model=dropping)
    torch.manual_seed(0)
    first = run.module(torch.ones(2, 4))
    torch.manual_seed(0)
    assert torch.equal(first, run.module(torch.ones(2, 4))), "it draws from the user's own numbers"
    assert [step.loss for step in run.steps(3)] == wanted


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 1))
