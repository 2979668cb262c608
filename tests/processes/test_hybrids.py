"""What people do with a run, done with divided models: precision, evaluation, checkpoints, recompute, batch norm."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import shoal
from torch import nn

from shoal import pipeline
from shoal.errors import ConfigError
from shoal.testing.parity import (
    ParityTrace,
    largest_difference,
    run_toy,
    take_step,
    toy_order,
    toy_parts,
    trace_run,
)
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE, Toy, grouped
from shoal.train.build import build
from shoal.train.evaluate import evaluate
from shoal.train.loop import Loop
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.world.world import World

STACK = TABLE.look_up("stack")
HYBRIDS = [
    "zero3",
    "zero3(replicas=2)",
    "ddp * tp2",
    "zero2 * pp2(microbatches=2)",
    "shared * tp2 * pp2(microbatches=2)",
    "zero3 * tp2",
]


class Normed(nn.Module):
    """Batch normalisation of vectors and of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.norm = nn.BatchNorm1d(16)
        self.filter = nn.Conv2d(1, 3, 3, padding=1)
        self.norms = nn.BatchNorm2d(3, momentum=None)
        self.last = nn.Sequential(nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.first(x))).view(-1, 1, 4, 4)
        out: torch.Tensor = self.last(torch.tanh(self.norms(self.filter(h))).flatten(1))
        return out


NORMED = Toy("batch normalisation", Normed, samples=27, global_batch=12, optimizer=grouped)


def with_changes(
    world: World, toy: Toy, strategies: list[str], changes: dict[str, Any], steps: int
) -> list[ParityTrace]:
    return [trace_run(world, replace(toy_order(toy, s), **changes), steps) for s in strategies]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_batch_normalisation_over_all_workers(workers: int) -> None:
    strategies = ["ddp", "zero1", "zero2", "zero3", "shared"] + (["ddp * tp2"] if workers == 4 else [])
    one = run_toy(World.alone(), NORMED, "solo", 6)
    for strategy, trace in zip(
        strategies, spawn(with_changes, workers, NORMED, strategies, {"batchnorm": "sync"}, 6)[0], strict=True
    ):
        gap, where = largest_difference(one, trace)
        assert gap <= 1e-10, f"{strategy} with {workers}: {gap:.1e} at {where}"


def test_its_own_samples_only_is_another_result() -> None:
    own = spawn(with_changes, 2, NORMED, ["ddp"], {}, 2)[0][0]
    assert largest_difference(run_toy(World.alone(), NORMED, "solo", 2), own)[0] > 1e-3


def test_recompute_changes_no_bit() -> None:
    # Where a model is split depends on measured times, and sums may round by it: here it is said.
    strategies = ["ddp", "zero3", "ddp * tp2", "ddp * pp2(microbatches=2, split=blocks.2)"]
    plain, again = (spawn(with_changes, 2, STACK, strategies, c, 4)[0] for c in ({}, {"recompute": "blocks"}))
    for strategy, a, b in zip(strategies, plain, again, strict=True):
        assert largest_difference(a, b) == (0.0, "nowhere"), strategy


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_near(precision: str) -> None:
    one = run_toy(World.alone(), STACK, "solo", 6, accumulate=2, precision=precision)
    strategies = ["zero3", "ddp * tp2", "zero1 * pp2(microbatches=2)"]
    for strategy, trace in zip(
        strategies, spawn(with_changes, 2, STACK, strategies, {"precision": precision}, 6)[0], strict=True
    ):
        for a, b in zip(one.losses, trace.losses, strict=True):
            assert math.isclose(a, b, rel_tol=0.05), f"{strategy} in {precision}: {a} and {b}"


def all_schedules(world: World) -> dict[str, ParityTrace]:
    strategies = {name: f"ddp * pp2({name}, microbatches=3)" for name in pipeline.TABLE}
    return {name: run_toy(world, STACK, strategy, 6) for name, strategy in strategies.items()}


def test_every_schedule_computes_the_same() -> None:
    one = run_toy(World.alone(), STACK, "solo", 6, accumulate=3)
    for name, trace in spawn(all_schedules, 2)[0].items():
        gap, where = largest_difference(one, trace)
        assert gap <= 1e-12, f"{name}: {gap:.1e} at {where}"


def measured(world: World, strategies: list[str]) -> list[tuple[float, float, float]]:
    found = []
    for strategy in strategies:
        parts = toy_parts(world, STACK, strategy)
        before = evaluate(parts, STACK.data(), {"hits": hits}, 7)  # type: ignore[arg-type]
        loss = take_step(parts, 0).loss
        found.append((before.loss, before.metrics["hits"], loss))
    return found


def hits(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return (output.argmax(-1) == batch[1]).sum(), batch[1].numel()


class Pooled(nn.Module):
    """Takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.head(x)
        return out


def measured_at_other_lengths(world: World, strategy: str) -> list[float]:
    parts = toy_parts(world, Toy("pooled", Pooled, tokens=True), strategy)
    generator = torch.Generator().manual_seed(2)
    data = [
        torch.utils.data.TensorDataset(*torch.randint(0, 11, (2, 9, n), generator=generator))
        for n in (3, 4, 6)
    ]
    return [evaluate(parts, d, {"hits": hits}, 4).loss for d in data]  # type: ignore[arg-type]


def test_evaluation_at_other_lengths() -> None:
    one = measured_at_other_lengths(World.alone(), "solo")
    for strategy in ("ddp * pp2(microbatches=2)", "ddp * tp2(loss=true)"):
        assert spawn(measured_at_other_lengths, 2, strategy)[0] == pytest.approx(one, rel=1e-12), strategy


def whole_state(world: World, strategy: str) -> dict[str, torch.Tensor]:
    return toy_parts(world, STACK, strategy).whole.state_dict()


@pytest.mark.parametrize("strategy", ["zero3", "ddp * tp2", "ddp * pp2(microbatches=2)"])
def test_the_whole_state_fits_the_model(strategy: str) -> None:
    model = STACK.model().double()
    model.load_state_dict(spawn(whole_state, 2, strategy)[0])
    given = whole_state(World.alone(), "solo")
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items())


def test_evaluation() -> None:
    one = measured(World.alone(), ["solo"])[0]
    for strategy, found in zip(HYBRIDS, spawn(measured, 4, HYBRIDS)[0], strict=True):
        assert found == pytest.approx(one, rel=1e-12), strategy


def go_on_under_others(world: World, folder: str, strategies: list[str]) -> list[list[float]]:
    """Three steps under each strategy, from a checkpoint of the one before; the losses."""
    losses = []
    for number, strategy in enumerate(strategies, 1):
        order = toy_order(STACK, strategy, 1 if "pp2" in strategy else 2)
        _, parts = build(order, world, record="")
        checkpoints = Checkpoints(parts, strategy, CheckpointConfig(Path(folder), every=3))
        loop = Loop(parts, None, checkpoints, None, {"strategy": strategy}, False)
        losses.append([report.loss for report in loop.steps(3 * number, checkpoints.resume())])
    return losses


def test_a_checkpoint_of_one_strategy_goes_on_under_the_next(tmp_path: Path) -> None:
    strategies = [*HYBRIDS, "ddp"]
    wanted = run_toy(World.alone(), STACK, "solo", 3 * len(strategies), accumulate=4).losses
    found = spawn(go_on_under_others, 4, str(tmp_path), strategies)[0]
    for number, (strategy, losses) in enumerate(zip(strategies, found, strict=True)):
        assert losses == pytest.approx(wanted[3 * number : 3 * number + 3], rel=1e-8), strategy


def refusal(world: World, toy: str, strategy: str, changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build(replace(toy_order(TABLE.look_up(toy), strategy), **changes), world, record="")
    return str(caught.value)


@pytest.mark.parametrize(
    ("workers", "toy", "strategy", "changes", "words"),
    [
        (2, "unused", "ddp * tp2", {}, "tp2 finds nothing to cut in this model"),
        (3, "stack", "ddp * tp3", {}, "2 heads, which tp3 cannot divide"),
        (
            2,
            "dropout",
            "ddp * pp2(interleaved, microbatches=2)",
            {},
            "4 stages need 3 places to split the model at",
        ),
        (2, "odd", "ddp * pp2(split=middle)", {}, "split= names 'middle', which is no module"),
        (
            2,
            "frozen",
            "ddp * tp2",
            {"tensor_rules": {"middle": "column"}},
            "tensor_rules: 'middle' is frozen",
        ),
        (
            2,
            "odd",
            "ddp * pp2(microbatches=20)",
            {},
            "global_batch=12 cannot be cut into 1 replicas × 20 micro-batches",
        ),
        (2, "dropout", "ddp", {"batchnorm": "all"}, "batchnorm='all'; it is 'own'"),
        (
            2,
            "stack",
            "ddp * pp2(zerobubble)",
            {"recompute": "blocks"},
            "recompute='blocks' under ddp * pp2(zerobubble)",
        ),
        (2, "dropout", "ddp", {"recompute": "all"}, "recompute='all'; it is 'blocks'"),
        (
            2,
            "dropout",
            "ddp * pp2(microbatches=2)",
            {"batchnorm": "sync"},
            "batchnorm='sync' under ddp * pp2",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    workers: int, toy: str, strategy: str, changes: dict[str, Any], words: str
) -> None:
    for said in spawn(refusal, workers, toy, strategy, changes):
        assert words in said
        assert "\n" not in said


SCRIPT = """
import torch, shoal
from shoal.testing.toys import TABLE, classify
toy = TABLE.look_up("stack")
run = shoal.Run(model=toy.model, loss=classify, optimizer=toy.optimizer, data=toy.data(), global_batch=12, log=None)
for step in run.steps(2):
    pass
whole = run.state_dict()
if run.world.rank == 0:
    print("parameters", sum(t.numel() for t in whole.values()), "loss", round(step.loss, 4))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_a_script_under_any_strategy(script: Path) -> None:
    said = set()
    for workers, strategy in ((1, "solo"), (4, "zero2 * tp2"), (4, "zero3 * pp2(microbatches=3)")):
        done = shoal(script.parent, "run", "--workers", str(workers), "--strategy", strategy, str(script))
        assert done.code == 0, done.err
        said.add(next(line for line in done.out.splitlines() if "parameters" in line).split("parameters")[1])
        if workers > 1:
            assert "rank     0 1 2 3" in done.err, "the map of the mesh"
    assert len(said) == 1, said


def test_verify_and_list(script: Path) -> None:
    done = shoal(
        script.parent,
        "verify",
        str(script),
        "--strategy",
        "zero1 * tp2 * pp2(microbatches=2)",
        "--workers",
        "4",
        "--steps",
        "2",
    )
    assert done.code == 0, done.err
    assert done.out.startswith("EQUAL: zero1 * tp2 * pp2(microbatches=2) with 4 workers")
    cut = shoal(script.parent, "list", "tensor", str(script))
    assert "blocks.*.linear1" in cut.out, cut.err
    split = shoal(script.parent, "list", "pipeline", str(script), "--stages", "2")
    assert "blocks" in split.out, split.err
    grid = shoal(
        script.parent, "list", "pipeline", "--stages", "4", "--microbatches", "8", "--schedule", "1f1b"
    )
    assert "idle 27.3 %" in grid.out
