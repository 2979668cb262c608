"""`shoal.Run(step=...)` in one process: what it refuses, what it reports, and what it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal import OwnStep
from shoal.errors import ConfigError, NonFiniteLoss


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def squares(ctx: OwnStep, batch: Any) -> None:
    ctx.backward("net", ctx["net"](batch[0]).square().sum(), len(batch[0]))
    ctx.update("net")


def data() -> TensorDataset:
    return TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))


def settings(**changes: Any) -> dict[str, Any]:
    models = {"net": lambda: nn.Linear(4, 1), "other": lambda: nn.Linear(4, 1)}
    common = {
        "models": models,
        "optimizers": {"net": sgd},
        "step": squares,
        "data": data(),
        "global_batch": 8,
    }
    return {**common, "log": None, "progress": False, **changes}


def trained(steps: int = 1, **changes: Any) -> tuple[shoal.Run, list[shoal.StepReport]]:
    run = shoal.Run(**settings(**changes))
    return run, list(run.steps(steps))


LINEAR = nn.Linear(4, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": None}, "a run needs model=, loss= and optimizer=; or models=, optimizers= and step=."),
        ({"step": "gan"}, "step= is a str; give a function of (ctx, batch)."),
        ({"models": {}}, "step= needs models=, a dict by name"),
        ({"optimizers": [sgd]}, "step= needs optimizers=, a dict by name"),
        ({"models": {"net": 3}}, "models['net'] is a int; give a function that makes one."),
        ({"models": {"net": lambda: 3}}, "models['net'] made a int; give an nn.Module"),
        ({"models": {"a.b": LINEAR}}, "models['a.b']: give it a name made of letters"),
        ({"models": {"keys": LINEAR}}, "models['keys']: give it a name made of letters"),
        ({"optimizers": {"nett": sgd}}, "optimizers['nett'] has no model; models are net, other."),
        ({"models": {"net": LINEAR, "twin": LINEAR}}, "models 'net' and 'twin' share a parameter"),
        ({"models": {"net": nn.Identity()}}, "the model has no trainable parameter"),
        ({"models": {"net": shoal.SparseEmbedding(9, 4)}}, "models['net'] has a SparseEmbedding"),
        ({"loss": squares}, "loss= does not go with step="),
        ({"model": LINEAR}, "model= does not go with step="),
        ({"accumulate": 2}, "accumulate= does not go with step="),
        ({"recompute": "blocks"}, "recompute= does not go with step="),
        ({"precision": "fp16"}, "precision='fp16' does not go with step="),
        ({"strategy": "zero3"}, "zero3 cannot follow a step of your own"),
        (
            {"strategy": "local(4)"},
            "use solo, ddp, zero1, zero2 or shared, without tpN, ppN or a compressor.",
        ),
        ({"strategy": "ddp + int8"}, "ddp + int8 cannot follow a step of your own"),
    ],
)
def test_a_run_that_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shoal.Run(**settings(**changes))
    assert words in str(caught.value)


def backward_of_what(what: Any, count: Any = None) -> Any:
    return lambda ctx, _: ctx.backward("net", what(ctx), count)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda ctx, _: ctx["nett"], "ctx['nett']: there is no such model; did you mean 'net'?"),
        (lambda ctx, _: ctx.update("other"), "ctx.update('other'): no model of that name has an optimizer"),
        (lambda ctx, _: ctx.update("net"), "ctx.update('net') comes before any ctx.backward('net', ...)"),
        (backward_of_what(lambda _: 0.5), "ctx.backward('net') got float; give a scalar tensor"),
        (backward_of_what(lambda ctx: ctx["net"].weight), "ctx.backward('net') got shape [1, 4]"),
        (backward_of_what(lambda _: torch.ones(())), "the loss does not depend on any trainable parameter"),
        (backward_of_what(lambda ctx: ctx["net"].weight.sum(), 0), "the count is 0 over all workers"),
        (
            backward_of_what(lambda ctx: ctx["net"].weight.sum()),
            "step 1 ended with a ctx.backward('net', ...)",
        ),
        (
            lambda ctx, _: ctx.randn(3, 2),
            "ctx.randn(3, 2): the first number is how many samples this worker has, 8",
        ),
        (lambda ctx, _: ctx.ema("other", of="net", decay=2.0), "the decay is from 0 to 1"),
        (
            lambda ctx, _: ctx.ema("net", of="other", decay=0.5),
            "ctx.ema('net', of='other'): 'net' has an optimizer",
        ),
        (lambda *_: 3, "step= returned a int; return nothing, or metrics by name"),
    ],
)
def test_a_call_that_cannot_work_is_refused(step: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trained(step=step)
    assert words in str(caught.value)


def test_draws_by_place_need_blocks() -> None:
    with pytest.raises(ConfigError, match="only partition='block' with equal shares tells"):
        trained(step=lambda ctx, batch: ctx.rand(len(batch[0])), partition="roundrobin")


def test_models_that_differ_do_not_follow_each_other() -> None:
    models = {"net": nn.Linear(4, 1), "other": nn.Linear(4, 2)}
    with pytest.raises(ConfigError, match="their parameters differ in names or shapes"):
        trained(step=lambda ctx, _: ctx.ema("other", of="net", decay=0.5), models=models)


def test_a_loss_that_is_not_finite_stops_or_is_skipped() -> None:
    def spoiled(ctx: OwnStep, batch: Any) -> None:
        bad = math.inf if ctx.number == 1 else 1.0
        ctx.backward("net", ctx["net"](batch[0]).square().sum() * bad, len(batch[0]))
        ctx.update("net")

    with pytest.raises(NonFiniteLoss, match="the loss or gradient of 'net' is not finite in step 2"):
        trained(2, step=spoiled)
    run = shoal.Run(**settings(step=spoiled, on_nan="skip"))
    weights = [run.state_dict()["net.weight"] for _ in run.steps(3)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert [report.skipped for report in trained(3, step=spoiled, on_nan="skip")[1]] == [False, True, False]


def test_a_model_without_an_optimizer_stays_as_it_is() -> None:
    teacher = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)).eval()
    before = teacher[0].weight.detach().clone()
    run, _ = trained(3, models={"net": lambda: nn.Linear(4, 1), "teacher": teacher})
    assert not teacher.training
    assert not teacher[0].weight.requires_grad
    assert torch.equal(run.state_dict()["teacher.0.weight"], before)


def test_initial_values_follow_from_the_name_of_the_model() -> None:
    first, second = [
        shoal.Run(**settings(models=models)).state_dict()
        for models in (
            {"net": lambda: nn.Linear(4, 1), "other": lambda: nn.Linear(4, 1)},
            {"another": lambda: nn.Linear(4, 3), "net": lambda: nn.Linear(4, 1)},
        )
    ]
    assert torch.equal(first["net.weight"], second["net.weight"])
    assert not torch.equal(first["net.weight"], first["other.weight"])


def test_metrics_are_means_over_the_step() -> None:
    def step(ctx: OwnStep, batch: Any) -> Any:
        squares(ctx, batch)
        squares(ctx, batch)
        ctx.mean("rows", 2.0 * len(batch[0]), len(batch[0]))
        ctx.mean("rows", 4.0)
        return {"first": torch.tensor(0.25), "pair": (torch.tensor(3.0), 4)}

    _, reports = trained(3, step=step)
    found = dict(reports[0].metrics)
    assert (found["rows"], found["first"], found["pair"]) == (3.0, 0.25, 0.75)
    assert reports[0].loss == found["loss/net"]
    assert [report.samples for report in reports] == [8, 8, 4]


def test_evaluate_gives_the_models_to_its_metrics() -> None:
    def size(models: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return models["net"](batch[0]).square().sum(), len(batch[0])

    run, _ = trained()
    rows = data().tensors[0]
    found = run.evaluate(data(), metrics={"loss": size})
    assert found.loss == pytest.approx(run.module["net"](rows).square().mean().item(), rel=1e-6)
    assert found.count == 20
    with pytest.raises(ConfigError, match="evaluate of a run with step= has no loss= to measure"):
        run.evaluate(data())


def test_a_schedule_moves_every_optimizer() -> None:
    optimizers = {"net": sgd, "other": lambda params: torch.optim.Adam(params, lr=0.4)}
    run, reports = trained(3, optimizers=optimizers, schedule="exponential(gamma=0.5)")
    assert [report.lr for report in reports] == [0.1, 0.05, 0.025]
    groups = run._context.exchange.optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.0125, 0.05])


def test_draws_follow_step_and_turn() -> None:
    found: list[torch.Tensor] = []

    def step(ctx: OwnStep, batch: Any) -> None:
        found.extend([ctx.randn(len(batch[0]), 2), ctx.randn(len(batch[0]), 2)])
        found.append(torch.rand(2, generator=ctx.generator()))

    trained(2, step=step)
    again = list(found)
    found.clear()
    trained(2, step=step)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
    assert len({tuple(t.flatten().tolist()) for t in found}) == len(found)


def test_bf16_computes_the_step_and_not_the_update() -> None:
    def step(ctx: OwnStep, batch: Any) -> None:
        output = ctx["net"](batch[0])
        assert output.dtype is torch.bfloat16
        ctx.backward("net", output.float().square().sum(), len(batch[0]))
        ctx.update("net")

    run, reports = trained(2, step=step, precision="bf16")
    assert run.state_dict()["net.weight"].dtype is torch.float32
    assert reports[1].loss < 10
