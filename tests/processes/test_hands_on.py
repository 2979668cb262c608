"""What a user does to a run: averages of weights, metrics, gradients, rates on a call, the best checkpoint, early stop.

One long training in float64 goes from strategy to strategy, three steps under each, by its checkpoints. All that it
shows must equal a loop written by hand in plain torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import shoal
from shoal import seeds
from shoal.data.order import GlobalOrder
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE
from shoal.world.world import World

STACK = TABLE.look_up("stack")
STRATEGIES = [
    "zero1",
    "zero2",
    "zero3",
    "shared",
    "ddp * tp2",
    "ddp * pp2(microbatches=2)",
    "zero3 * pp2(microbatches=2)",
    "ddp",
]
EACH = 3
DECAY, SEED, BAD = 0.9, 3, 5
AVERAGES = {"ema": f"ema({DECAY})", "swa": "swa(start=4, every=2)"}


def halve(gradients: Any) -> None:
    """What the user does to gradients: exact on every shard."""
    for name, gradient in gradients.items():
        gradient.mul_(0.5 if "weight" in name else 0.25)


def spoiled(output: torch.Tensor, batch: Any) -> Any:
    """A loss that is no number where one sample takes part, and so on one rank only."""
    total, count = STACK.loss(output, batch)
    bad = (batch[0] == STACK.data()[BAD][0]).flatten(1).all(1).any()
    return (total * math.nan if bool(bad) else total), count


def right(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ((output.argmax(-1) == batch[1]) & (batch[1] >= 0)).sum(), (batch[1] >= 0).sum()


def plateau(made: torch.optim.Optimizer) -> lrs.LRScheduler:
    return lrs.ReduceLROnPlateau(made, factor=0.5, patience=1)


@contextmanager
def started(world: World) -> Iterator[None]:
    """As a launcher would have started this rank."""
    told = {
        "RANK": world.rank,
        "LOCAL_RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": world.size,
    }
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


def make_run(strategy: str, root: Path, **changes: Any) -> shoal.Run:
    settings: dict[str, Any] = {
        "model": STACK.model,
        "loss": spoiled,
        "optimizer": STACK.optimizer,
        "data": STACK.data(),
        "global_batch": STACK.global_batch,
        "strategy": strategy,
        "precision": "fp64",
        "seed": SEED,
        "accumulate": 1 if "pp2" in strategy else 2,
        "on_nan": "skip",
        "clip": 0.5,
        "schedule": plateau,
        "metrics": {"right": right},
        "checkpoint": str(root),
        "checkpoint_every": EACH,
        "progress": False,
        "log": None,
    }
    return shoal.Run(**{**settings, **changes})


def metric_of(step: int) -> float:
    """What a validation might say: better at first, then not."""
    return max(1.0, 3.0 - step / 4)


Seen = dict[str, Any]


def train(world: World, root: str, kind: str) -> list[Seen]:
    """Three steps under each strategy; what there was to see after each step."""
    seen = []
    with started(world):
        for number, strategy in enumerate(STRATEGIES, 1):
            text = (
                strategy if strategy[:5] in ("zero3",) or "*" in strategy else f"{strategy}(bucket_mb=0.002)"
            )
            run = make_run(text, Path(root), ema=AVERAGES[kind])
            with run.gradients(halve):
                for step in run.steps(EACH * number):
                    # As people measure: what training uses again must not be made in that mode.
                    with torch.inference_mode():
                        seen.append(look(run, step, kind))
                    run.schedule_step(
                        metric_of(step.number) + world.rank - (world.size - 1) / 2
                    )  # the mean counts
    return seen


def look(run: shoal.Run, step: Any, kind: str) -> Seen:
    last = step.number % EACH == 0
    return {
        "loss": step.loss,
        "lr": step.lr,
        "right": step.metrics["right"],
        "skipped": step.skipped,
        "evaluated": run.evaluate(STACK.data(), weights=kind, batch=7, metrics={"right": right}).metrics[
            "right"
        ],
        "average": run.state_dict(weights=kind) if last else None,
        "weights": run.state_dict() if last else None,
    }


def by_hand(kind: str, steps: int) -> list[Seen]:
    model = seeds.build_by_name(STACK.model, SEED).double()
    optimizer = STACK.optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    average = {n: p.detach().clone() for n, p in model.state_dict().items()}
    data, count, seen = STACK.data(), 0, []
    order, per_epoch = GlobalOrder(len(data), SEED), -(-len(data) // STACK.global_batch)
    for step in range(steps):
        epoch, inside = divmod(step, per_epoch)
        low = inside * STACK.global_batch
        ids = order.ids(epoch, low, min(low + STACK.global_batch, len(data))).tolist()
        batch = torch.utils.data.default_collate([data[i] for i in ids])
        output = model(batch[0])
        total, n = spoiled(output, batch)
        found: Seen = {"loss": (total / n).item(), "lr": optimizer.param_groups[0]["lr"]}
        hits, of = right(output, batch)
        found |= {"right": int(hits) / int(of), "skipped": BAD in ids}
        if BAD not in ids:
            optimizer.zero_grad()
            (total / n).backward()
            halve({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            for name, p in model.state_dict().items():
                if kind == "ema":
                    average[name] = DECAY * average[name] + (1 - DECAY) * p
                elif step + 1 >= 4 and (step + 1 - 4) % 2 == 0:
                    average[name] = (
                        p.clone() if count == 0 else average[name] + (p - average[name]) / (count + 1)
                    )
            count += step + 1 >= 4 and (step + 1 - 4) % 2 == 0
        live = {n: p.detach().clone() for n, p in model.state_dict().items()}
        shown = live if kind == "swa" and count == 0 else {n: p.clone() for n, p in average.items()}
        found |= {"weights": live, "average": shown, "evaluated": hits_of(shown)}
        seen.append(found)
        scheduler.step(metric_of(step + 1))
    return seen


def hits_of(weights: dict[str, torch.Tensor]) -> float:
    model = STACK.model().double()
    model.load_state_dict(weights)
    model.eval()
    batch = torch.utils.data.default_collate([STACK.data()[i] for i in range(len(STACK.data()))])
    hits, of = right(model(batch[0]), batch)
    return int(hits) / int(of)


def close(found: Any, wanted: Any, where: str) -> None:
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (found, wanted))
    torch.testing.assert_close(
        a, b, rtol=1e-12, atol=1e-12, equal_nan=True, msg=lambda text: f"{where}: {text}"
    )


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_it_equals_the_loop_by_hand_under_every_strategy(tmp_path: Path, kind: str) -> None:
    ranks = spawn(train, 2, str(tmp_path), kind)
    wanted = by_hand(kind, EACH * len(STRATEGIES))
    assert sum(one["skipped"] for one in wanted) >= 2, "the bad sample has to come"
    assert len({one["lr"] for one in wanted}) > 2, "rates have to move"
    for number, (first, second, hand) in enumerate(zip(*ranks, wanted, strict=True), 1):
        where = f"step {number}, {STRATEGIES[(number - 1) // EACH]}"
        for key in ("loss", "lr", "right", "evaluated"):
            assert repr(first[key]) == repr(second[key]), f"{key} on both ranks, {where}"
            close(first[key], hand[key], f"{key}, {where}")
        assert first["skipped"] == hand["skipped"], where
        for what in ("average", "weights") if number % EACH == 0 else ():
            assert first[what].keys() == hand[what].keys()
            for name, value in hand[what].items():
                close(first[what][name], value, f"{what} of {name}, {where}")
