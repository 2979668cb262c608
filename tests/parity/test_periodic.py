"""local and diloco: what they must equal, where they must end, and what they keep over a restart."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from shoal.exchange.periodic.outer_step import Outer
from shoal.testing.parity import ParityTrace, largest_difference, take_step, toy_order, trace_run
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.step import run_step
from shoal.world.world import World

STEPS = 12


def plain_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def sgd_order(toy: str, strategy: str) -> RunConfig:
    order = toy_order(TOYS[toy], strategy)
    return dataclasses.replace(order, optimizer=plain_sgd, clip=None)


def run_all(world: World, cells: list[tuple[str, str]]) -> dict[tuple[str, str], ParityTrace]:
    return {(s, toy): trace_run(world, sgd_order(toy, s), STEPS) for s, toy in cells}


TOYS_ALIKE = [name for name in TOYS if name not in ("dropout", "drawing")]


@pytest.mark.parametrize("workers", [2, 3])
def test_meeting_after_every_step_of_sgd_is_ddp(workers: int) -> None:
    """One step of SGD from the same anchor, averaged by counts, is one step of SGD with the mean gradient."""
    strategies = ["local(1)", "diloco(1, lr=1.0, momentum=0.0)", "diloco(1, lr=1, momentum=0) + none"]
    cells = [(s, toy) for s in ["ddp", *strategies] for toy in TOYS_ALIKE]
    found = spawn(run_all, workers, cells, timeout=120)[0]
    for strategy in strategies:
        for toy in TOYS_ALIKE:
            ours, theirs = found[strategy, toy], found["ddp", toy]
            gap, where = largest_difference(
                dataclasses.replace(theirs, losses=[]), dataclasses.replace(ours, losses=[])
            )
            assert gap <= 1e-12, f"{strategy}, {toy}: {gap:.2e} at {where}"


def outer_steps(anchor: torch.Tensor, worker: list[torch.Tensor], lr: float, mu: float) -> list[torch.Tensor]:
    """What DiLoCo's outer optimizer does, by torch's own: `worker` are the means that workers come to meetings with."""
    parameter = torch.nn.Parameter(anchor.clone())
    outer = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=True)
    found = []
    for mean in worker:
        parameter.grad = parameter.detach() - mean
        outer.step()
        found.append(parameter.detach().clone())
    return found


def test_the_outer_optimizer_is_torchs_nesterov() -> None:
    torch.manual_seed(0)
    anchor, means = (
        torch.randn(50, dtype=torch.float64),
        [torch.randn(50, dtype=torch.float64) for _ in range(4)],
    )
    wanted = outer_steps(anchor, means, 0.7, 0.9)
    momentum, outer = torch.zeros_like(anchor), Outer(0.7, 0.9)
    for mean, value in zip(means, wanted, strict=True):
        outer.step(anchor, anchor - mean, momentum)
        torch.testing.assert_close(anchor, value, rtol=1e-13, atol=1e-13)


def all_parameters(world: World, strategy: str, steps: int) -> list[dict[str, torch.Tensor]]:
    """This worker's own parameters after every step."""
    parts = build(sgd_order("uneven", strategy), world, record="")[1]
    found = []
    for number in range(steps):
        take_step(parts, number)
        found.append({name: p.detach().clone() for name, p in parts.model.named_parameters()})
    return found


def test_workers_are_alike_after_meetings_and_not_between() -> None:
    first, second = spawn(all_parameters, 2, "local(4) + int8", 8)
    for number, (a, b) in enumerate(zip(first, second, strict=True), 1):
        same = all(torch.equal(a[name], b[name]) for name in a)
        assert same == (number % 4 == 0), number


def test_fragments_meet_in_turn() -> None:
    first, second = spawn(all_parameters, 2, "diloco(4, fragments=2, bucket_mb=0.0001)", 8)
    alike = [
        {name for name in a if torch.equal(a[name], b[name])} for a, b in zip(first, second, strict=True)
    ]
    assert alike[0] == alike[2] == set()
    assert alike[1]
    assert alike[3]
    assert not alike[1] & alike[3]
    assert alike[1] | alike[3] == set(first[0])
    assert alike[5] == alike[1]
    assert alike[7] == alike[3]


def train(world: World, strategy: str, folder: str, begin: int, steps: int) -> ParityTrace:
    order = toy_order(TOYS["uneven"], strategy)
    plan, parts = build(order, world, record="")
    checkpoints = Checkpoints(parts, str(plan), CheckpointConfig(root=Path(folder)))
    progress = checkpoints.resume()
    parts.exchange.start(progress.step, None)
    assert progress.step == begin
    losses = [take_step(parts, number).loss for number in range(begin, steps)]
    checkpoints.save(f"step-{steps}", Progress(steps))
    return ParityTrace(losses, parts.whole.parameters(), parts.whole.optimizer_state())


KEPT = [
    "local(5)",
    "diloco(5)",
    "diloco(5) + int8(feedback=true)",
    "ddp + topk(0.1)",
    "zero1 + sign",
    "zero2 + topk(0.1)",
    "ddp + randomk(0.2)",
    "ddp + powersgd(2)",
]


def restart(world: World, root: str) -> dict[str, tuple[ParityTrace, ParityTrace, ParityTrace]]:
    found = {}
    for number, strategy in enumerate(KEPT):
        folder = Path(root) / str(number)
        whole = train(world, strategy, str(folder / "whole"), 0, 9)
        first = train(world, strategy, str(folder / "cut"), 0, 4)
        found[strategy] = (whole, first, train(world, strategy, str(folder / "cut"), 4, 9))
    return found


def test_a_restart_in_the_middle_of_a_round_changes_nothing(tmp_path: Path) -> None:
    """Each worker goes on with its own parameters, optimizer state and what it had not sent: the same bits."""
    for strategy, (whole, first, second) in spawn(restart, 2, str(tmp_path), timeout=120)[0].items():
        assert whole.losses == first.losses + second.losses, strategy
        for name, value in whole.parameters.items():
            assert torch.equal(value, second.parameters[name]), f"{strategy}: {name}"


def grow(world: World, root: str) -> list[ParityTrace]:
    return [
        train(world, strategy, str(Path(root) / str(number)), 4, 9)
        for number, strategy in enumerate(
            ["diloco(5)", "ddp", "ddp + topk(0.1)", "solo" if world.size == 1 else "zero1"]
        )
    ]


def begin_all(world: World, root: str) -> list[ParityTrace]:
    return [
        train(world, strategy, str(Path(root) / str(number)), 0, 4)
        for number, strategy in enumerate(["diloco(5)", "diloco(5)", "ddp + topk(0.1)", "ddp + topk(0.1)"])
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_what_was_learned_moves_to_other_sizes_and_strategies(tmp_path: Path, workers: int) -> None:
    before = spawn(begin_all, 2, str(tmp_path))[0]
    after = spawn(grow, workers, str(tmp_path))[0]
    for first, second in zip(before, after, strict=True):
        assert all(value == value for value in second.losses)
        assert max(second.losses) < 3 * max(first.losses)


def slow_steps(
    world: World, strategy: str, steps: int
) -> tuple[list[int], list[int], dict[str, torch.Tensor]]:
    """What a worker did, what it reported, and where it ended; the last worker takes its time."""
    parts = build(sgd_order("odd", strategy), world, record="")[1]
    made, reported, at = [], [], 0
    while (view := parts.exchange.work.next(at, steps)) is not None:
        if world.rank == world.size - 1:
            time.sleep(0.05)
        made.append(view.step)
        at = run_step(parts, view).number
        reported.append(at)
    return made, reported, parts.exchange.parameters()


def test_a_quorum_does_not_wait_for_a_slow_worker() -> None:
    found = spawn(slow_steps, 3, "local(40, quorum=0.6)", 80)
    for made, reported, _ in found[:2]:
        assert made == list(range(80))
        assert reported == list(range(1, 81))
    made, reported, _ = found[2]
    assert len(made) < 60, "the slow worker was waited for"
    assert {40, 80} <= set(reported), "it was at no meeting"
    assert reported == sorted(reported)
    for _, _, parameters in found[1:]:
        for name, value in parameters.items():
            assert torch.equal(value, found[0][2][name]), f"{name} differs after the last meeting"


def test_without_a_quorum_everybody_does_everything() -> None:
    for made, reported, _ in spawn(slow_steps, 3, "local(10)", 20):
        assert made == list(range(20))
        assert reported == list(range(1, 21))
