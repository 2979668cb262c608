"""Learning rates by name equal torch's own, and a schedule that is put down is taken up where it stood."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as lrs

from shoal.errors import ConfigError
from shoal.train.technique.learning_rate import (
    MakeScheduler,
    advance,
    make_scheduler,
    restore_schedule,
    schedule_state,
)

STEPS = 24
Make = Callable[[Optimizer], lrs.LRScheduler]


def optimizer() -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.03)]
    return SGD(groups, momentum=0.9)


def losses(step: int) -> float:
    return max(1.0, 5.0 - step) + 0.1 * (step % 3)


def follow(made: Optimizer, scheduler: lrs.LRScheduler, start: int, stop: int) -> list[list[float]]:
    """What every step from `start` to `stop` used: rates and momenta."""
    used = []
    for step in range(start, stop):
        used.append([float(group[key]) for group in made.param_groups for key in ("lr", "momentum")])
        made.step()
        advance(scheduler, losses(step))
    return used


def cosine(made: Optimizer) -> lrs.LRScheduler:
    """Warmup, then torch's cosine."""
    return lrs.SequentialLR(
        made,
        [lrs.LinearLR(made, 0.25, 1.0, total_iters=3), lrs.CosineAnnealingLR(made, STEPS - 4)],
        milestones=[4],
    )


NAMED: list[tuple[str, Make]] = [
    ("exponential(0.9)", lambda o: lrs.ExponentialLR(o, 0.9)),
    ("step(5)", lambda o: lrs.StepLR(o, 5)),
    ("step(size=5, gamma=0.5)", lambda o: lrs.StepLR(o, 5, 0.5)),
    ("plateau(factor=0.5, patience=4)", lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=4)),
    ("constant", lambda o: lrs.ConstantLR(o, 1.0)),
    ("constant(warmup=4)", lambda o: lrs.LinearLR(o, 0.25, 1.0, total_iters=3)),
    ("cosine", lambda o: lrs.CosineAnnealingLR(o, STEPS)),
]


@pytest.mark.parametrize(("name", "torchs"), NAMED, ids=[name for name, _ in NAMED])
def test_named_schedules_equal_torchs(name: str, torchs: Make) -> None:
    ours, theirs = optimizer(), optimizer()
    made = make_scheduler(name, ours, STEPS)
    assert made is not None
    found, wanted = follow(ours, made, 0, STEPS), follow(theirs, torchs(theirs), 0, STEPS)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=1e-9)


def test_cosine_with_warmup_and_floor() -> None:
    made = optimizer()
    scheduler = make_scheduler("cosine(warmup=4, floor=0.1)", made, STEPS)
    assert scheduler is not None
    rates = [row[0] for row in follow(made, scheduler, 0, STEPS + 3)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1), "the top comes right after the rise"
    middle = 4 + (STEPS - 4) // 2
    assert rates[middle] == pytest.approx(0.1 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2))))
    assert rates[STEPS:] == pytest.approx([0.01] * 3), "at the floor from the end on"
    assert rates[4:] == sorted(rates[4:], reverse=True)


RESUMED: list[str | MakeScheduler] = [
    *(name for name, _ in NAMED),
    "cosine(warmup=4)",
    cosine,
    lambda o: lrs.MultiStepLR(o, [5, 10, 12]),
    lambda o: lrs.OneCycleLR(o, [0.1, 0.2], total_steps=STEPS + 1),  # moves momentum too
    lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    lambda o: lrs.CosineAnnealingWarmRestarts(o, 5, 2),
    lambda o: lrs.MultiplicativeLR(o, lambda _: 0.9),
    lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.95), lrs.StepLR(o, 6)], o),
    lambda o: lrs.PolynomialLR(o, STEPS),
]


@pytest.mark.parametrize("schedule", RESUMED)
@pytest.mark.parametrize("stop", [1, 11])
def test_a_schedule_goes_on_where_it_stood(schedule: str | MakeScheduler, stop: int) -> None:
    whole = optimizer()
    first = make_scheduler(schedule, whole, STEPS)
    assert first is not None
    wanted = follow(whole, first, 0, STEPS)

    before = optimizer()
    scheduler = make_scheduler(schedule, before, STEPS)
    assert scheduler is not None
    found = follow(before, scheduler, 0, stop)
    kept = json.loads(json.dumps(schedule_state(scheduler)))  # as it lies in a checkpoint
    after = optimizer()
    scheduler = make_scheduler(schedule, after, STEPS)
    assert scheduler is not None
    restore_schedule(scheduler, kept)
    assert found + follow(after, scheduler, stop, STEPS) == wanted

    # Also on the same optimizer, as when run.steps is called twice.
    again = make_scheduler(schedule, before, STEPS)
    assert again is not None
    restore_schedule(again, kept)
    assert follow(before, again, stop, STEPS) == wanted[stop:]


def test_rates_kept_in_a_tensor() -> None:
    def tensors() -> Optimizer:
        return Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))

    made = tensors()
    scheduler = make_scheduler("exponential(0.5)", made, STEPS)
    assert scheduler is not None
    for _ in range(3):
        made.step()
        advance(scheduler, 0.0)
    fresh = tensors()
    again = make_scheduler("exponential(0.5)", fresh, STEPS)
    assert again is not None
    restore_schedule(again, json.loads(json.dumps(schedule_state(scheduler))))
    assert isinstance(fresh.param_groups[0]["lr"], torch.Tensor)
    assert float(fresh.param_groups[0]["lr"]) == 0.0625


def test_wrong_schedules_get_a_sentence() -> None:
    made = optimizer()
    assert make_scheduler(None, made, 1) is None
    with pytest.raises(ConfigError, match="unknown schedule 'cosin'; did you mean 'cosine'"):
        make_scheduler("cosin", made, 1)
    with pytest.raises(ConfigError, match="cosine has no option 'warm'; did you mean 'warmup'"):
        make_scheduler("cosine(warm=3)", made, 1)
    with pytest.raises(ConfigError, match="exponential needs gamma"):
        make_scheduler("exponential", made, 1)
    with pytest.raises(ConfigError, match="schedule= returned SGD; give a name"):
        make_scheduler(lambda o: o, made, 1)  # type: ignore[arg-type, return-value]


def test_no_warning_where_the_servers_step_the_optimizer() -> None:
    """A worker of ps never calls optimizer.step, and torch would warn of it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler("constant", optimizer, None)
    assert scheduler is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advance(scheduler, 0.0)
        advance(scheduler, 0.0)
    assert scheduler.last_epoch == 2
