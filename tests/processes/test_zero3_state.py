"""What zero3 holds, and what it gives and takes whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal import seeds
from shoal.config import fill_options
from shoal.errors import ConfigError
from shoal.exchange import make_exchange
from shoal.exchange.contract import Exchange, StepView, Tally
from shoal.exchange.fsdp.units import UnitOptions
from shoal.exchange.setup import Setup
from shoal.exchange.zero3 import Zero3
from shoal.testing.parity import give_parameters
from shoal.testing.spawn import spawn
from shoal.types import Choice
from shoal.world.mesh import Mesh
from shoal.world.world import World

TOKENS = torch.randint(0, 13, (8, 5), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Blocks, tied ends, buffers, a number, nothing, and a parameter of another type than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(5)) for _ in range(3))
        self.head = nn.Linear(6, 13)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.other = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.table = nn.Buffer(torch.linspace(0, 1, 6), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.table * self.other.float() + self.nothing.sum()
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.head(x)
        return out


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def made() -> nn.Module:
    return seeds.build_by_name(Model, 7)


def open_exchange(
    world: World, name: str, model: nn.Module, options: dict[str, str] | None = None
) -> Exchange:
    mesh = Mesh.open(world, replicas=1).torch
    return make_exchange(
        Choice(name, (), tuple((options or {}).items())), Setup(model, adamw, world, mesh=mesh)
    )


def step(exchange: Exchange, model: nn.Module, world: World, update: bool = True) -> float:
    mine = TOKENS[world.rank :: world.size]
    exchange.begin(StepView(0))
    loss = F.cross_entropy(model(mine).flatten(0, 1), mine.flatten(), reduction="sum")
    exchange.backward(loss, 1.0, last=True)
    tally = exchange.finish(Tally(loss.item(), mine.numel()))
    if update:
        exchange.apply(1.0 / tally.count, None)
        exchange.publish()
    return tally.total / tally.count


def hold_rows(world: World) -> None:
    model = made()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    exchange = open_exchange(world, "zero3", model)
    assert isinstance(exchange, Zero3)
    assert [name for name, _ in model.named_parameters()] == list(whole)
    assert exchange._rows.whole.keys() == {"scale", "nothing", "other"}
    places = {name: part.held.data_ptr() for name, part in exchange._rows.parts.items()}
    for name, part in exchange._rows.parts.items():
        rows = whole[name].chunk(world.size)
        mine = rows[world.rank] if world.rank < len(rows) else whole[name][:0]
        assert torch.equal(part.held, mine), name
    for _ in range(3):
        step(exchange, model, world)
        for name, part in exchange._rows.parts.items():
            assert part.held.data_ptr() == places[name] == part.parameter._local_tensor.data_ptr()
            assert part.gathered.untyped_storage().size() == 0, f"{name} is still gathered"
            assert part.parameter.grad is None
    state = exchange.optimizer.state
    held = sum(part.held.numel() for part in exchange._rows.parts.values())
    held += sum(p.numel() for p in exchange._rows.whole.values())
    assert sum(s["exp_avg"].numel() for s in state.values()) == held


def test_a_worker_holds_its_rows_and_nothing_else() -> None:
    spawn(hold_rows, 4)


def compare(world: World) -> None:
    """zero3 beside ddp from the same start: gradients, then state and parameters moved both ways."""
    models = {name: made() for name in ("ddp", "zero3")}
    running = {name: open_exchange(world, name, model) for name, model in models.items()}
    for name, exchange in running.items():
        assert step(exchange, models[name], world, update=False) > 0
    wanted, found = running["ddp"].gradients(), running["zero3"].gradients()
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(running["zero3"].grad_norm(), running["ddp"].grad_norm(), rtol=1e-5, atol=0)
    for exchange in running.values():
        exchange.discard()
    for first, second in (("ddp", "zero3"), ("zero3", "ddp")):
        for _ in range(2):
            step(running[first], models[first], world)
        give_parameters(running[second], running[first].parameters())
        running[second].load_optimizer_state(running[first].optimizer_state())
        losses = [step(running[n], models[n], world) for n in (first, second)]
        assert abs(losses[0] - losses[1]) < 1e-5
        one, other = running[first].parameters(), running[second].parameters()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def test_gradients_state_and_parameters_are_those_of_ddp() -> None:
    spawn(compare, 3)


def fill(world: World) -> None:
    whole = made()
    values = {n: t.detach().clone() for n, t in [*whole.named_parameters(), *whole.named_buffers()]}
    asked: list[str] = []

    def value(name: str) -> torch.Tensor:
        asked.append(name)
        return values[name]

    with torch.device("meta"):
        model = Model()
    mesh = Mesh.open(world, replicas=1).torch
    exchange = make_exchange(Choice("zero3"), Setup(model, adamw, world, mesh=mesh, values=value))
    assert sorted(asked) == sorted(values)
    for name, tensor in exchange.parameters().items():
        assert torch.equal(tensor, values[name]), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, values[name]), name
    assert model.head.weight is model.embed.weight
    other = open_exchange(world, "zero3", whole)
    for _ in range(3):
        assert step(exchange, model, world) == step(other, whole, world)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_without_memory_is_filled_row_by_row(workers: int) -> None:
    spawn(fill, workers)


def evaluate_between(world: World) -> None:
    """Passes without a backward leave parameters gathered; nobody may compute with old ones afterwards."""
    model, plain = made(), made()
    exchange, other = open_exchange(world, "zero3", model), open_exchange(world, "zero3", plain)
    for _ in range(3):
        with torch.no_grad():
            model(TOKENS)
        model.zero_grad()
        assert step(exchange, model, world) == pytest.approx(step(other, plain, world), abs=0.2)
    values = other.parameters()
    with torch.no_grad():
        model(TOKENS)
    give_parameters(exchange, values)
    model.eval(), plain.eval()
    for buffer, source in zip(model.buffers(), plain.buffers(), strict=True):
        buffer.copy_(source)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain(TOKENS))


def test_evaluation_does_not_leave_old_parameters() -> None:
    spawn(evaluate_between, 2)


class Plain(nn.Module):
    """Operations that all exist in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.head(x)
        return out


def travel(world: World, gather: str) -> tuple[list[float], int]:
    model = seeds.build_by_name(Plain, 7)
    exchange = open_exchange(world, "zero3", model, {"gather": gather})
    before = world.traffic.bytes_sent
    losses = [step(exchange, model, world) for _ in range(5)]
    sent = world.traffic.bytes_sent - before
    assert all(p.dtype == torch.float32 for p in exchange.parameters().values())
    return losses, sent


def test_parameters_may_travel_in_bf16() -> None:
    ((same, bytes_same), *_), ((short, bytes_short), *_) = (spawn(travel, 2, g) for g in ("same", "bf16"))
    assert same != short
    assert same == pytest.approx(short, rel=0.05)
    assert 0.65 < bytes_short / bytes_same < 0.8  # gathers are halved, sums are not


def test_a_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="gather='fp8'"):
        fill_options(Choice("zero3", (), (("gather", "fp8"),)), UnitOptions)
