"""Several runs in one process, and what stays behind of one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from shoal.errors import ConfigError
from shoal.testing.parity import take_step, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.testing.toys import Toy
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.world.world import World

EXCHANGES = ("ddp", "zero1", "zero2", "zero3", "shared")


def leave_nothing(world: World) -> list[str]:
    kept = []
    for name in EXCHANGES:
        parts = toy_parts(world, TOYS["odd"], name)
        take_step(parts, 0)
        ghost = weakref.ref(parts.exchange)
        del parts
        gc.collect()
        if ghost() is not None:
            kept.append(name)
    return kept


def test_a_finished_run_is_freed() -> None:
    assert spawn(leave_nothing, 2) == [[], []]


@pytest.mark.parametrize("name", EXCHANGES)
def test_backward_passes_of_others_are_theirs(name: str) -> None:
    net = nn.Linear(5, 3)
    toy = Toy("given", lambda: net)
    take_step(toy_parts(World.alone(), toy, name), 0)
    net.zero_grad()
    net(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert torch.equal(net.bias.grad, torch.full((3,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("name", EXCHANGES)
def test_two_runs_on_one_module(name: str) -> None:
    net = nn.Linear(5, 3)
    toy = Toy("given", lambda: net)
    toy_parts(World.alone(), toy, name)  # made, never stepped
    second = toy_parts(World.alone(), toy, name)
    before = net.weight.detach().clone()
    for number in range(3):
        take_step(second, number)
    assert not torch.equal(net.weight, before), "the second run trains the module"


@pytest.mark.parametrize("name", EXCHANGES)
def test_compiled_models_train(name: str) -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    compiled = torch.compile(nets[0], backend="aot_eager")
    traces = []
    for net in (compiled, nets[1]):
        parts = toy_parts(World.alone(), Toy("given", lambda net=net: net), name)
        traces.append([take_step(parts, number).loss for number in range(4)])
    assert traces[0] == pytest.approx(traces[1], rel=1e-12)


def scalar_and_back(world: World) -> list[str]:
    wrong = []
    for make in (optim.NAdam, optim.ASGD):
        toy = Toy("odd", TOYS["odd"].model, optimizer=lambda params, make=make: make(params, lr=0.01))
        parts = toy_parts(world, toy, "zero1(bucket_mb=0.002)")
        take_step(parts, 0)
        first = parts.exchange.optimizer_state()
        parts.exchange.load_optimizer_state(first)
        second = parts.exchange.optimizer_state()
        for name, entries in first.items():
            for key, value in entries.items():
                if second[name][key].shape != value.shape or not torch.equal(second[name][key], value):
                    wrong.append(f"{make.__name__} {name} {key}")
    return wrong


def test_state_of_a_parameter_of_one_number_survives() -> None:
    assert spawn(scalar_and_back, 2) == [[], []]


def test_sparse_adam_is_refused_where_gradients_are_dense() -> None:
    toy = Toy("sparse", lambda: nn.Linear(5, 3), optimizer=lambda params: optim.SparseAdam(params))
    with pytest.raises(ConfigError, match="ddp keeps gradients dense, and SparseAdam"):
        toy_parts(World.alone(), toy, "ddp")


def sgd(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


def two_nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.0), nn.Linear(7, 6))
    return first.double(), nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 1)
    ).double()


def two_sources() -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return tuple(torch.randn(26, size, generator=draws, dtype=torch.float64) for size in (4, 6))


def two_by_hand() -> list[torch.Tensor]:
    nets, (z, x) = two_nets(), two_sources()
    optimizers = [sgd(list(net.parameters())) for net in nets]
    for rows in (slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 26)):
        for optimizer in optimizers:
            optimizer.zero_grad()
            output = nets[1](nets[0](z[rows])) - 1 if optimizer is optimizers[0] else nets[1](x[rows])
            output.square().mean().backward()
            optimizer.step()
    return [p.detach() for net in nets for p in net.parameters()]


def squares(output: torch.Tensor, _: object) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


def two_runs(world: World, strategies: list[str]) -> dict[str, float]:
    """The first run's loss goes through the second's model; the largest difference to plain torch."""
    found = {}
    for strategy in strategies:
        (first, second), (z, x) = two_nets(), two_sources()
        common = {"optimizer": sgd, "global_batch": 8, "shuffle": False, "precision": "fp64"}
        asked = RunConfig(model=second, loss=squares, data=TensorDataset(x), strategy=strategy, **common)
        judge = build(asked, world, record="")[1]

        def judged(
            output: torch.Tensor, _: object, judge: nn.Module = judge.model
        ) -> tuple[torch.Tensor, int]:
            return squares(judge(output) - 1, None)

        asked = RunConfig(model=first, loss=judged, data=TensorDataset(z), strategy=strategy, **common)
        runs = [build(asked, world, record="")[1], judge]
        for number in range(4):
            for run in runs:
                take_step(run, number)
        ours = [p for run in runs for p in run.whole.parameters().values()]
        pairs = zip(ours, two_by_hand(), strict=True)
        found[strategy] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


def test_two_runs_take_turns() -> None:
    """What one run's backward pass leaves at the other's parameters is not the other's gradient."""
    assert max(two_runs(World.alone(), ["solo", *EXCHANGES]).values()) < 1e-12
    for found in spawn(two_runs, 3, list(EXCHANGES)):
        assert max(found.values()) < 1e-12
