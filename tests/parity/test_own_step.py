"""A step of the user's own computes what the hand-written loop in plain torch computes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_programs import PROGRAMS, STEPS, Losses, adam

from shoal import OwnStep
from shoal.checkpoint.folder import look
from shoal.checkpoint.load import Reader
from shoal.errors import ConfigError
from shoal.exchange.contract import StepView
from shoal.testing.spawn import spawn
from shoal.train.own_step.build import build_own_step
from shoal.train.own_step.run_own_step import run_own_step
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.step_context import StepContext
from shoal.world.world import World

STRATEGIES = ("ddp", "zero1", "zero2", "shared")


def train(
    world: World, name: str, strategy: str, deterministic: bool = False
) -> tuple[Losses, dict[str, torch.Tensor]]:
    config = replace(PROGRAMS[name].config(strategy), deterministic=deterministic)
    context = build_own_step(config, world, record="")[1]
    try:
        losses = [dict(run_own_step(context, StepView(step)).metrics) for step in range(STEPS)]
        return losses, context.whole.state_dict()
    finally:
        context.exchange.close()
        torch.use_deterministic_algorithms(False)


def differences(world: World, strategies: tuple[str, ...], deterministic: bool = False) -> dict[str, float]:
    """The largest relative difference to plain torch, by program and strategy."""
    found = {}
    for name, program in PROGRAMS.items():
        losses, state = program.reference()
        for strategy in strategies:
            ours, theirs = train(world, name, strategy, deterministic)
            assert [sorted(one) for one in ours] == [sorted(one) for one in losses]
            assert sorted(theirs) == sorted(state)
            gaps = [
                abs(a[k] - b[k]) / max(abs(b[k]), 1.0) for a, b in zip(ours, losses, strict=True) for k in b
            ]
            gaps += [
                float((theirs[k] - v).abs().max() / v.abs().max().clamp(min=1e-3)) for k, v in state.items()
            ]
            found[f"{name} under {strategy}"] = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
    return found


def wrong(found: dict[str, float]) -> dict[str, float]:
    return {cell: gap for cell, gap in found.items() if not gap < 1e-10}


def test_alone() -> None:
    assert not wrong(differences(World.alone(), ("solo", "ddp", "zero2")))


@pytest.mark.parametrize("workers", [2, 3])
def test_programs_equal_plain_torch(workers: int) -> None:
    """Three workers have one without samples in the last step."""
    for found in spawn(differences, workers, STRATEGIES):
        assert not wrong(found)


def test_deterministic_programs_equal_plain_torch() -> None:
    for found in spawn(differences, 2, ("ddp", "zero2"), True):
        assert not wrong(found)


# State

HELD = {1: ["solo", "zero2"], 2: ["ddp", "zero1", "zero2", "shared"], 3: ["zero1", "shared"]}
HALF = STEPS // 2


def go_on(context: StepContext, begin: int, end: int) -> dict[str, torch.Tensor]:
    for step in range(begin, end):
        run_own_step(context, StepView(step))
    return context.whole.state_dict()


def save(world: World, root: str) -> dict[str, dict[str, torch.Tensor]]:
    """A checkpoint in the middle, by strategy and size; what the run ends with when it goes on."""
    found = {}
    for strategy in HELD[world.size]:
        context = build_own_step(PROGRAMS["byol"].config(strategy), world, record="")[1]
        go_on(context, 0, HALF)
        name = f"{strategy}-{world.size}"
        Checkpoints(context, strategy, CheckpointConfig(Path(root))).save(name, Progress(HALF))
        found[name] = go_on(context, HALF, STEPS)
    return found


def resume(world: World, root: str) -> dict[str, dict[str, torch.Tensor]]:
    """What every strategy here makes of every checkpoint, in the second half."""
    found = {}
    for strategy in HELD[world.size]:
        for entry in look(Path(root)):
            context = build_own_step(PROGRAMS["byol"].config(strategy), world, record="")[1]
            checkpoints = Checkpoints(context, strategy, CheckpointConfig(Path(root)))
            assert checkpoints.take_over(Reader.of(entry)).step == HALF
            found[f"{entry.name} -> {strategy}-{world.size}"] = go_on(context, HALF, STEPS)
    return found


def test_checkpoints_go_anywhere(tmp_path: Path) -> None:
    """Bit for bit where nothing has changed; up to rounding under another strategy or with other workers."""
    _, wanted = PROGRAMS["byol"].reference()
    ended = save(World.alone(), str(tmp_path))
    resumed = {}
    for workers in (2, 3):
        ended |= spawn(save, workers, str(tmp_path))[0]
    resumed |= resume(World.alone(), str(tmp_path))
    for workers in (2, 3):
        resumed |= spawn(resume, workers, str(tmp_path))[0]
    assert len(ended) == 8
    assert len(resumed) == 64
    for label, state in resumed.items():
        before, _, now = label.partition(" -> ")
        assert sorted(state) == sorted(wanted), label
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12, msg=f"{label}: {name}")
            assert before != now or torch.equal(value, ended[now][name]), f"{label}: {name}"


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    save(World.alone(), str(tmp_path))
    config = replace(PROGRAMS["byol"].config("solo"), optimizers={"online": adam, "head": adam})
    context = build_own_step(config, World.alone(), record="")[1]
    with pytest.raises(
        ConfigError, match="was written with head: SGD, online: Adam, and optimizer= now makes head: Adam"
    ):
        Checkpoints(context, "solo", CheckpointConfig(tmp_path)).take_over(Reader.of(look(tmp_path)[0]))


# What a step may not do, on several workers


def other_calls(ctx: OwnStep, batch: Any) -> None:
    x = batch[0]
    name = "gen" if ctx.models["gen"].rank == 1 else "disc"
    ctx.backward(name, ctx["disc"](ctx["gen"](ctx.randn(len(x), 4))).mean())


def fewer_calls(ctx: OwnStep, batch: Any) -> None:
    if ctx.models["gen"].rank == 0:
        ctx.backward("disc", ctx["disc"](batch[0]).mean())
        ctx.update("disc")


def plain_backward(ctx: OwnStep, batch: Any) -> None:
    ctx.backward("disc", ctx["disc"](batch[0]).mean())
    ctx["disc"](batch[0]).mean().backward()
    ctx.update("disc")


def by_hand(ctx: OwnStep, batch: Any) -> None:
    ctx.backward("disc", ctx["disc"](batch[0]).mean())
    ctx.update("disc")
    with torch.no_grad():
        for p in ctx["disc"].parameters():
            p.clamp_(-0.1, 0.1)


def stale(ctx: OwnStep, batch: Any) -> None:
    """Through a graph from before the update: plain torch refuses it too."""
    score = ctx["disc"](ctx["gen"](ctx.randn(len(batch[0]), 4))).mean()
    ctx.backward("disc", score, retain_graph=True)
    ctx.update("disc")
    ctx.backward("gen", score)


def said(world: World, cases: list[tuple[str, str]]) -> list[str]:
    """What each step says under each strategy, or nothing."""
    found = []
    for strategy, step in cases:
        config = PROGRAMS["gan"].config(strategy)
        config.models["gen"].rank = world.rank  # type: ignore[index, assignment]
        context = build_own_step(replace(config, step=globals()[step]), world, record="")[1]
        try:
            run_own_step(context, StepView(0))
            found.append("")
        except (ConfigError, RuntimeError) as error:
            found.append(str(error))
    return found


CASES = [
    ("zero2", "other_calls", "rank 0 is at ctx.backward('disc')"),
    ("ddp", "fewer_calls", "the end of the step, with the metrics []"),
    ("zero1", "plain_backward", "'disc.0.weight' has a gradient that did not come by ctx.backward"),
    ("shared", "by_hand", "the parameters of 'disc' were changed by hand"),
    ("ddp", "by_hand", ""),
    ("shared", "stale", "modified by an inplace operation"),
    ("zero2", "stale", "modified by an inplace operation"),
]


def test_what_would_be_wrong_is_refused_on_every_rank() -> None:
    for sentences in spawn(said, 2, [case[:2] for case in CASES]):
        for (strategy, step, wanted), sentence in zip(CASES, sentences, strict=True):
            assert (wanted in sentence) if wanted else not sentence, f"{step} under {strategy}: {sentence}"
    assert "rank 1 at ctx.backward('gen') (" in sentences[0]
    assert "own_step.py:" in sentences[0]
