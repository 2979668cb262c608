"""zero3 equals one process in all its forms, and on models made to hurt it; test_exchanges.py has the toys."""

from __future__ import annotations

import pytest
import torch
from sized import SIZED
from torch import nn

from shoal.testing.parity import ParityTrace, largest_difference, run_toy
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.testing.toys import Toy
from shoal.world.world import World


class Skipping(nn.Module):
    """Blocks that run only where a sample asks for them, so not on every worker."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = x
        for i, block in enumerate(self.blocks):
            mask = wanted[:, i % 5] > 0.8
            if bool(mask.any()):
                x = x + mask.to(x.dtype).unsqueeze(1) * torch.tanh(block(x))
        out: torch.Tensor = self.head(x)
        return out


class Twice(nn.Module):
    """Every block runs twice, so gradients come twice too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.head(x)
        return out


class Backwards(nn.Module):
    """Blocks that run in another order than the model holds them in; the first ones are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 3)
        self.blocks[3].requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = torch.tanh(block(x))
        out: torch.Tensor = self.head(x)
        return out


class Strange(nn.Module):
    """A parameter whose strides cannot be cut, and one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, sparse=True)
        self.mix = nn.Parameter(torch.empty(11, 6).t())
        nn.init.normal_(self.mix)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.embed(tokens)) @ self.mix
        return out


MADE = {
    "skipping": Toy("blocks that some workers skip", Skipping, accumulate=2, clip=0.3),
    "twice": Toy("blocks that run twice", Twice, accumulate=2),
    "backwards": Toy("blocks in another order", Backwards),
    "strange": Toy("what cannot be cut", Strange, tokens=True),
}
EVERY = {**dict(TOYS.items()), **MADE}
STEPS = 6
"""Two epochs of the toys with a last batch that is too small, three of the others."""


def run_toys(world: World, strategy: str, names: list[str]) -> dict[str, ParityTrace]:
    return {name: run_toy(world, EVERY[name], strategy, STEPS) for name in names}


def check(strategy: str, workers: int, names: list[str] | None = None, backend: str = "auto") -> None:
    chosen = list(EVERY) if names is None else names
    traces = spawn(run_toys, workers, strategy, chosen, backend=backend)
    for name in chosen:
        toy = EVERY[name]
        wanted = run_toy(World.alone(), toy, "solo", STEPS, accumulate=workers * toy.accumulate)
        for rank, found in enumerate(traces):
            gap, where = largest_difference(wanted, found[name])
            assert gap < 1e-12, f"{name} under {strategy}, rank {rank} of {workers}: {gap:.2e} at {where}"
            assert found[name].losses == traces[0][name].losses
            assert found[name].state.keys() == wanted.state.keys()
            for key, entries in wanted.state.items():
                for entry, value in entries.items():
                    torch.testing.assert_close(found[name].state[key][entry], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_equals_one_process(workers: int) -> None:
    check("zero3", workers, list(MADE))


@pytest.mark.parametrize("option", ["reshard=false", "offload=true"])
def test_options_change_no_number(option: str) -> None:
    check(f"zero3({option})", 2)


@pytest.mark.parametrize(("replicas", "names"), [(2, list(EVERY)), (4, [*MADE, *SIZED])], ids=["2", "4"])
def test_replicas(replicas: int, names: list[str]) -> None:
    check(f"zero3(replicas={replicas})", 4, names)


def test_by_messages() -> None:
    check("zero3", 3, [*MADE, "unused", "uneven"], backend="gloo")
