"""`penalty=` is what a plain program adds to its mean loss, once per step: under every strategy, in float64.

The penalty couples all layers, so that no sum over parts of the model has its gradient; one parameter has no gradient
but from it. Shares are uneven, labels are padded, gradients are clipped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from plain import plain_loop
from torch import nn

from shoal.errors import ConfigError
from shoal.testing.parity import ParityTrace, largest_difference, toy_order, trace_run
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.run_config import RunConfig
from shoal.world.world import World

STEPS = 4


def coupled(module: nn.Module) -> torch.Tensor:
    squares = torch.stack([p.square().sum() for p in module.parameters()]).sum()
    first = next(iter(module.parameters()))
    return 0.01 * squares * first.abs().sum() + 0.001 * squares


def order_of(toy: str, strategy: str, accumulate: int | None = None) -> RunConfig:
    return replace(toy_order(TOYS[toy], strategy, accumulate), penalty=coupled, clip=0.3)


@cache
def plain(toy: str) -> ParityTrace:
    def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        total, count = TOYS[toy].loss(model(batch[0]), batch)
        return total / count + coupled(model)

    return plain_loop(order_of(toy, "solo"), mean_loss, STEPS)


def run_pairs(world: World, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], ParityTrace]:
    return {(strategy, toy): trace_run(world, order_of(toy, strategy), STEPS) for strategy, toy in pairs}


PAIRS = {
    2: [("ddp * tp2", "tied"), ("zero3 * tp2", "uneven"), ("zero2 * pp2(microbatches=3)", "tied")],
    3: [
        ("ddp(bucket_mb=0.002)", "unused"),
        ("ddp", "uneven"),
        ("zero1(bucket_mb=0.002)", "tied"),
        ("zero2", "accumulated"),
        ("shared(bucket_mb=0.002)", "uneven"),
        ("zero3", "unused"),
        ("zero3", "uneven"),
        ("zero3", "frozen"),
        ("ps(servers=1)", "uneven"),
    ],
    4: [
        ("shared * tp2", "stack"),
        ("zero3 * pp2(microbatches=2)", "stack"),
        ("zero1 * pp2(interleaved, microbatches=2)", "stack"),
        ("zero3(replicas=2)", "odd"),
    ],
}


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_penalty_is_what_one_process_adds(workers: int) -> None:
    traces = spawn(run_pairs, workers, PAIRS[workers], timeout=200)
    for strategy, toy in PAIRS[workers]:
        for rank, found in enumerate(traces):
            if found[strategy, toy].losses or not rank:
                gap, where = largest_difference(plain(toy), found[strategy, toy])
                assert gap < 1e-11, f"{toy} under {strategy}, rank {rank}: {gap:.2e} at {where}"


def test_alone_and_in_micro_batches() -> None:
    for toy, accumulate in (("unused", 1), ("uneven", 5)):
        found = trace_run(World.alone(), order_of(toy, "solo", accumulate), STEPS)
        gap, where = largest_difference(plain(toy), found)
        assert gap < 1e-12, f"{toy}: {gap:.2e} at {where}"


def test_each_worker_that_trains_apart_has_the_penalty_in_its_loss() -> None:
    for trace in spawn(run_pairs, 2, [("local(1)", "odd")]):
        assert all(math.isfinite(loss) for loss in trace["local(1)", "odd"].losses)
    alone = trace_run(World.alone(), order_of("odd", "local(1)"), STEPS)
    assert largest_difference(plain("odd"), alone)[0] < 1e-12


@pytest.mark.parametrize(
    ("penalty", "words"),
    [
        (lambda _: 0.5, "penalty= returned float; return a scalar tensor"),
        (lambda module: list(module.parameters())[1], "penalty= returned Tensor of shape [131, 5]"),
        (
            lambda module: next(module.parameters()).detach().sum(),
            "the penalty does not depend on any trainable",
        ),
        ("l2", "penalty= is a str; give a function."),
    ],
)
def test_what_is_no_penalty_is_refused(penalty: object, words: str) -> None:
    order = replace(order_of("odd", "solo"), penalty=penalty)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        trace_run(World.alone(), order, 1)
    assert words in str(caught.value)
