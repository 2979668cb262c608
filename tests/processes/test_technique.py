"""Training technique is right under every exchange: two workers against a loop written by hand in plain torch.

The hand-written loop knows nothing of Shoal but the order of the samples and the initial weights. It sees whole
batches in one process; what two workers compute must equal it in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs
from torch.utils.data import TensorDataset

from shoal import seeds
from shoal.data.order import GlobalOrder
from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.testing.toys import Odd, Unused, adamw, grouped
from shoal.train.build import build
from shoal.train.evaluate import evaluate
from shoal.train.loop import Loop
from shoal.train.run_config import RunConfig
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
from shoal.types import Evaluation, StepReport
from shoal.world.world import World

EXCHANGES = ("ddp", "zero1", "zero2", "zero3", "shared")
SAMPLES, BATCH, STEPS, SEED = 26, 12, 10, 3  # the last batch of an epoch has two samples
BAD = 7  # the sample that spoils a loss in some cases


def samples() -> TensorDataset:
    """Inputs, labels of which some are padding, and each sample's id."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, 5, generator=generator)
    y = torch.randint(0, 3, (SAMPLES,), generator=generator)
    y[4] = y[9] = -1
    return TensorDataset(x, y, torch.arange(SAMPLES))


def classify(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(output, batch[1], reduction="sum", ignore_index=-1)
    return total, (batch[1] >= 0).sum()


def spoiled(factor: float) -> Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]:
    """A loss that goes wrong at one sample, and so on one rank only."""

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = classify(output, batch)
        return (total * factor if bool((batch[2] == BAD).any()) else total), count

    return loss


MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]
MakeScheduler = Callable[[optim.Optimizer], lrs.LRScheduler]


@dataclass(frozen=True)
class Case:
    """What is asked of Shoal, and what the loop by hand does instead."""

    optimizer: MakeOptimizer = adamw
    clip: float | str | None = None
    schedule: str | MakeScheduler | None = None
    by_hand: MakeScheduler | None = None
    accumulate: int = 1
    model: Callable[[], nn.Module] = Odd
    loss: Any = classify
    on_nan: str = "stop"
    precision: str = "fp64"


def sgd(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def one_cycle(made: optim.Optimizer) -> lrs.LRScheduler:
    return lrs.OneCycleLR(made, max_lr=0.05, total_steps=STEPS + 1)


def cosine(made: optim.Optimizer) -> lrs.LRScheduler:
    return lrs.CosineAnnealingLR(made, STEPS)


class Late(nn.Module):
    """A parameter that gets its first gradient after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.late = nn.Parameter(torch.ones(3))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        out: torch.Tensor = self.body(x)
        return out + self.late if self.steps > 4 else out


CASES: dict[str, Case] = {
    "plain": Case(),
    "late": Case(model=Late, optimizer=sgd),
    "late and dampened": Case(
        model=Late, optimizer=lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3)
    ),
    "unused": Case(model=Unused),
    "clip by norm": Case(clip=0.05),
    "clip by value": Case(clip="value(0.004)", optimizer=sgd),
    "accumulate": Case(accumulate=3, clip=0.05),
    "cosine": Case(schedule="cosine", by_hand=cosine),
    "warmup": Case(
        schedule="constant(warmup=4)", by_hand=lambda o: lrs.LinearLR(o, 0.25, 1.0, total_iters=3)
    ),
    "exponential": Case(schedule="exponential(0.8)", by_hand=lambda o: lrs.ExponentialLR(o, 0.8)),
    "step": Case(schedule="step(3, gamma=0.5)", by_hand=lambda o: lrs.StepLR(o, 3, 0.5)),
    "plateau": Case(
        schedule="plateau(factor=0.5, patience=1)",
        by_hand=lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=1),
    ),
    "any scheduler": Case(schedule=one_cycle, by_hand=one_cycle),
    "groups": Case(optimizer=grouped),
    "momentum": Case(optimizer=sgd),
    "rmsprop": Case(optimizer=lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True)),
    "adagrad": Case(
        optimizer=lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.3)
    ),
    "nadam": Case(optimizer=lambda p: optim.NAdam(p, lr=0.01)),
    "radam": Case(optimizer=lambda p: optim.RAdam(p, lr=0.01)),
    "amsgrad": Case(optimizer=lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1)),
    "maximize": Case(optimizer=lambda p: optim.SGD(p, lr=0.01, maximize=True)),
    "skip nan": Case(loss=spoiled(math.nan), on_nan="skip", schedule="cosine", by_hand=cosine),
}
ROUGH: dict[str, Case] = {
    "bf16": Case(precision="bf16"),
    "fp16": Case(precision="fp16"),
    "overflow": Case(precision="fp16", loss=spoiled(1e30)),
}
WHOLE = {"adafactor": Case(optimizer=lambda p: optim.Adafactor(p, lr=0.05))}


@dataclass(frozen=True)
class Found:
    """What a run showed."""

    reports: list[StepReport]
    parameters: dict[str, torch.Tensor]
    changed: list[bool]
    """Whether each step changed a parameter."""
    scale: float
    evaluation: Evaluation | None = None
    more: dict[str, Any] = field(default_factory=dict)


def train(world: World, case: Case, strategy: str, accumulate: int = 1, steps: int = STEPS) -> Found:
    order = RunConfig(
        model=case.model,
        loss=case.loss,
        optimizer=case.optimizer,
        data=samples(),  # type: ignore[arg-type]
        global_batch=BATCH,
        strategy=strategy,
        precision=case.precision,
        clip=case.clip,
        accumulate=case.accumulate * accumulate,
        seed=SEED,
        inputs=None,
        collate=None,
        shuffle=True,
        loader_workers=0,
        on_nan=case.on_nan,
        deterministic=False,
    )
    plan, parts = build(order, world, record="")
    checkpoints = Checkpoints(parts, str(plan), CheckpointConfig())
    loop = Loop(parts, case.schedule, checkpoints, None, {"strategy": str(plan)}, False)
    reports, changed = [], []
    before = parts.whole.parameters()
    for report in loop.steps(steps, Progress()):
        reports.append(report)
        after = parts.whole.parameters()
        changed.append(any(not torch.equal(before[name], after[name]) for name in after))
        before = after
    measured = evaluate(parts, held_out(), METRICS, batch=8) if case.precision == "fp64" else None
    return Found(reports, before, changed, parts.scale.value, measured)


def held_out() -> Any:
    """Nineteen samples in batches of eight: with two workers, shares of 4 and 4, 4 and 4, 2 and 1."""
    return TensorDataset(*(t[:19] for t in samples().tensors))


METRICS = {
    "right": lambda output, batch: ((output.argmax(-1) == batch[1]).sum(), (batch[1] >= 0).sum()),
    "size": lambda output, _: output.abs().mean(),
}


def by_hand(case: Case) -> tuple[list[float], list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, rates, parameters and metrics of the same training, written as one would without Shoal."""
    model = seeds.build_by_name(case.model, SEED).double()
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = case.by_hand(optimizer) if case.by_hand is not None else None
    x, y, ids = samples().tensors
    order, per_epoch = GlobalOrder(SAMPLES, SEED), -(-SAMPLES // BATCH)
    losses, rates = [], []
    for step in range(STEPS):
        epoch, inside = divmod(step, per_epoch)
        some = torch.from_numpy(order.ids(epoch, inside * BATCH, min((inside + 1) * BATCH, SAMPLES)))
        total, count = case.loss(model(x[some].double()), (None, y[some], ids[some]))
        loss = total / count
        losses.append(loss.item())
        rates.append(float(optimizer.param_groups[0]["lr"]))
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        if isinstance(case.clip, float):
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        elif case.clip is not None:
            nn.utils.clip_grad_value_(model.parameters(), 0.004)
        optimizer.step()
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()
    model.eval()
    x, y, ids = held_out().tensors
    with torch.no_grad():
        output = model(x.double())
        total, count = case.loss(output, (None, y, torch.zeros_like(ids)))
        right = int((output.argmax(-1) == y).sum()) / int((y >= 0).sum())
        measured = [float(total / count), float(right), float(output.abs().mean())]
    return losses, rates, {n: p.detach().clone() for n, p in model.named_parameters()}, measured


def check_against_hand(name: str, case: Case, found: Found, strategy: str) -> None:
    where = f"{name} under {strategy}"
    losses, rates, parameters, measured = by_hand(case)
    close([r.loss for r in found.reports], losses, f"losses, {where}")
    assert [r.lr for r in found.reports] == pytest.approx(rates, rel=1e-9), f"rates, {where}"
    for key, value in parameters.items():
        close(found.parameters[key], value, f"{key}, {where}")
    assert found.evaluation is not None
    if case.loss is not classify:
        return
    seen = [found.evaluation.loss, found.evaluation.metrics["right"], found.evaluation.metrics["size"]]
    close(seen, measured, f"evaluation, {where}")


def close(found: Any, wanted: Any, what: str) -> None:
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (found, wanted))
    torch.testing.assert_close(
        a, b, rtol=1e-11, atol=1e-12, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


@pytest.fixture(scope="module")
def alone() -> dict[str, Found]:
    """One process that cuts steps as two workers would."""
    return {
        name: train(World.alone(), case, "solo", accumulate=2) for name, case in {**CASES, **ROUGH}.items()
    }


@pytest.mark.parametrize("name", [*CASES, *WHOLE])
def test_one_process_equals_the_loop_by_hand(name: str) -> None:
    case = {**CASES, **WHOLE}[name]
    check_against_hand(name, case, train(World.alone(), case, "solo"), "solo")


def everything(world: World, strategy: str, names: list[str]) -> dict[str, Found]:
    cases = {**CASES, **ROUGH, **WHOLE}
    return {
        name: train(world, cases[name], strategy if strategy == "zero3" else f"{strategy}(bucket_mb=0.002)")
        for name in names
    }


@pytest.mark.parametrize("strategy", EXCHANGES)
def test_two_workers_equal_the_loop_by_hand(strategy: str, alone: dict[str, Found]) -> None:
    names = [*CASES, *ROUGH, *(WHOLE if strategy == "ddp" else ())]
    first, second = spawn(everything, 2, strategy, names)
    for name in names:
        for theirs, ours in zip(first[name].reports, second[name].reports, strict=True):
            same = [
                (r.number, r.epoch, repr(r.loss), r.samples, r.count, r.lr, r.grad_norm, r.skipped)
                for r in (theirs, ours)
            ]
            assert same[0] == same[1], f"{name}: ranks see the same"
        assert first[name].evaluation == second[name].evaluation or name == "skip nan"
        for key, value in first[name].parameters.items():
            assert torch.equal(value, second[name].parameters[key]), f"{name}: {key} on both ranks"
        if name in CASES or name in WHOLE:
            check_against_hand(name, {**CASES, **WHOLE}[name], first[name], strategy)
    check_skips(first["skip nan"], second["skip nan"])
    check_rough(first, second, alone)


def check_skips(*ranks: Found) -> None:
    for found in ranks:
        dropped = [r.skipped for r in found.reports]
        assert 2 <= sum(dropped) <= 4, "the bad sample comes once in an epoch"
        assert [math.isnan(r.loss) for r in found.reports] == dropped
        assert found.changed == [not skipped for skipped in dropped], "a dropped step changes nothing"
        assert not dropped[-1] or not dropped[-2], "training goes on"


def check_rough(first: dict[str, Found], second: dict[str, Found], alone: dict[str, Found]) -> None:
    for name in ROUGH:
        wanted = alone[name]
        found = [r.loss for r in first[name].reports]
        assert found == pytest.approx([r.loss for r in wanted.reports], rel=2e-2), name
        assert [r.skipped for r in first[name].reports] == [r.skipped for r in wanted.reports], name
        assert first[name].scale == second[name].scale == wanted.scale, name
    assert not any(r.skipped for r in first["bf16"].reports)
    for found_on in (first["overflow"], second["overflow"]):
        drops = [r.skipped for r in found_on.reports]
        assert 2 <= sum(drops) <= 4
        assert found_on.scale == 2.0 ** (16 - sum(drops)), "each overflow halves the scale, on every rank"
        assert found_on.changed == [not skipped for skipped in drops]
        assert all(math.isfinite(r.loss) for r in found_on.reports)


@pytest.mark.parametrize("strategy", ["solo", "ddp"])
def test_an_optimizer_over_other_parameters(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    model[1].requires_grad_(False)
    # The factory may ignore what it is given and take all parameters, frozen ones among them.
    case = Case(model=lambda: model, optimizer=lambda _: optim.AdamW(model.parameters(), lr=0.1))
    found = train(World.alone(), case, strategy, steps=2)
    assert found.changed == [True, True]
    stranger = Case(optimizer=lambda _: optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="optimizer= holds a parameter that is not the model's"):
        train(World.alone(), stranger, strategy, steps=1)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "shared"])
def test_optimizers_that_need_whole_parameters_are_refused(strategy: str) -> None:
    for make in (lambda p: optim.Adafactor(p), lambda p: optim.Muon([q for q in p if q.ndim == 2])):
        with pytest.raises(
            ConfigError, match=f"{strategy} cuts parameters into slices, and (Adafactor|Muon) is not"
        ):
            train(World.alone(), Case(optimizer=make), strategy, steps=1)
