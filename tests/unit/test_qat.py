"""Rounding in training: the grid, ranges that workers agree on, and what is handed over. Parity with several workers
is in tests/contracts/test_recipe_contract.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import ConfigError
from shoal.recipe.quantise.rounding import RoundedConv2d, RoundedLinear, round_activation, round_weight
from shoal.testing.parity import take_step
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
from shoal.world.world import World

X = (
    torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    * torch.arange(1, 25)[:, None, None, None]
)
Y = torch.arange(24) % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.inner = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(self.conv(x).flatten(1).relu()).relu())
        return out


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def config(**changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.01),
        "data": TensorDataset(X, Y),
        "global_batch": 8,
        "strategy": "solo",
        "precision": "fp64",
        "recipes": "qat",
        "shuffle": False,
    }
    return RunConfig(**{**settings, **changes})


def test_the_grid() -> None:
    weight = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    for bits in (8, 4):
        rounded = round_weight(weight, bits)
        for row in rounded:
            assert len(row.detach().unique()) <= 2**bits - 1
        step = weight.detach().flatten(1).abs().amax(1) / (2 ** (bits - 1) - 1)
        assert bool(((rounded - weight).detach().abs().flatten(1) <= step[:, None] / 2 + 1e-12).all())
        assert torch.equal(torch.autograd.grad(rounded.sum(), weight)[0], torch.ones_like(weight))
    value = torch.linspace(-2, 3, 101, dtype=torch.float64, requires_grad=True)
    out = round_activation(value, -1.0, 2.0)
    assert len(out.detach().unique()) <= 256
    assert float(out.detach().min()) == pytest.approx(-1.0, abs=0.01)
    assert float(out.detach().max()) == pytest.approx(2.0, abs=0.01)
    assert round_activation(torch.zeros(1), -1.0, 2.0) == 0, "zero is exact"
    gradient = torch.autograd.grad(out.sum(), value)[0]
    assert gradient[50] == 1
    assert gradient[0] == gradient[-1] == 0, "what is cut off learns nothing"


def ranges_of(world: World, strategy: str) -> dict[str, Any]:
    parts = build(config(strategy=strategy), world, "")[1]
    for step in range(3):
        take_step(parts, step)
    state = parts.recipes.state()["qat"]
    assert isinstance(state, dict)
    return dict(state["ranges"])


def test_all_workers_have_the_ranges_of_one_process() -> None:
    """The largest samples lie on the last worker: ranges of its own would differ by an order of magnitude."""
    wanted = ranges_of(World.alone(), "solo")
    assert set(wanted) == {"conv", "inner", "head"}
    low = [float(X[8 * step : 8 * step + 8].min()) for step in range(3)]
    moved = low[0]
    for one in low[1:]:
        moved += 0.1 * (one - moved)
    assert wanted["conv"][0] == pytest.approx(moved, rel=1e-12)
    for strategy in ("zero3", "ddp * pp2"):
        for found in spawn(ranges_of, 2, strategy):
            assert found.keys() == wanted.keys()
            for name, pair in found.items():
                assert pair == pytest.approx(wanted[name], rel=1e-12), f"{name} under {strategy}"


def test_a_run_goes_on_with_its_ranges(tmp_path: Path) -> None:
    """Saved in the middle: the same bits afterwards, and the same numbers under another strategy."""
    parts = build(config(), World.alone(), "")[1]
    for step in range(2):
        take_step(parts, step)
    Checkpoints(parts, "solo", CheckpointConfig(tmp_path)).save("half", Progress(2))
    wanted = [take_step(parts, step).loss for step in (2, 3)]
    assert gone_on(World.alone(), "solo", str(tmp_path)) == wanted
    for found in spawn(gone_on, 2, "zero3", str(tmp_path)):
        assert found == pytest.approx(wanted, rel=1e-10)


def gone_on(world: World, strategy: str, folder: str) -> list[float]:
    parts = build(config(strategy=strategy), world, "")[1]
    Checkpoints(parts, strategy, CheckpointConfig(Path(folder))).resume()
    return [take_step(parts, step).loss for step in (2, 3)]


def test_names_stay_and_what_is_handed_over_is_on_the_grid() -> None:
    run = shoal.Run(**{**vars(config(recipes="qat(int4, skip=head)")), "log": None, "progress": False})
    for _ in run.steps(2):
        pass
    kinds = {name: type(module) for name, module in run.module.named_modules()}
    assert kinds["conv"] is RoundedConv2d
    assert kinds["inner"] is RoundedLinear
    assert kinds["head"] is nn.Linear
    plain, handed = run.state_dict(), run.state_dict(weights="export")
    assert list(plain) == list(handed) == list(Net().state_dict())
    assert all(len(row.unique()) <= 15 for row in handed["inner.weight"])
    assert torch.equal(plain["head.weight"], handed["head.weight"])
    assert not torch.equal(plain["inner.weight"], handed["inner.weight"])


def test_a_weight_that_an_embedding_shares_is_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.middle = nn.Linear(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.middle(self.embed(x)))
            return out

    data = TensorDataset(torch.arange(8) % 7, torch.arange(8) % 7)
    parts = build(config(model=Tied, data=data), World.alone(), "")[1]
    assert type(parts.model.get_submodule("middle")) is RoundedLinear
    assert type(parts.model.get_submodule("head")) is nn.Linear


@pytest.mark.parametrize(
    ("recipes", "words"),
    [
        ("qat(int2)", "qat(int2): it is int8 or int4"),
        ("qat(share=0)", "share=0; begin is 0 or more, share above 0"),
        ("qat(skip='*')", "Net has no Linear or Conv2d to round"),
    ],
)
def test_mistakes_with_rounding_are_said(recipes: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        build(config(recipes=recipes), World.alone(), "")
    assert words in str(found.value)
