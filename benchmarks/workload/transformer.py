"""The model that most benchmarks train, and the two loops around it: one by hand with torch, one of Shoal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.workload.steps import make_stepper
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.step_context import StepContext
from shoal.world.world import World

VOCABULARY, CONTEXT = 4096, 64


class Transformer(nn.Module):
    """A plain decoder-only language model."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.mask = nn.Buffer(nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.mask)
        out: torch.Tensor = self.head(self.norm(x))
        return out


SIZES = {"20M": (512, 5), "60M": (768, 8)}
"""Width and depth."""


def make_transformer(size: str) -> Transformer:
    """With random weights."""
    return Transformer(*SIZES[size])


def make_fsdp2(size: str, mesh: DeviceMesh, reshard: bool) -> nn.Module:
    """Cut by FSDP2 as its documentation shows it: every block a unit, then the rest."""
    model = make_transformer(size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def count_parameters(model: nn.Module) -> int:
    """How many numbers it learns."""
    return sum(p.numel() for p in model.parameters())


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, int]:
    """The summed surprise at each true next token, and how many they were."""
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused, as all contestants use it."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def dataset(sequences: int) -> TensorDataset:
    """The same random sequences, whoever asks."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (sequences, CONTEXT + 1), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@dataclass(frozen=True)
class Case:
    """What is trained."""

    size: str
    batch: int
    """Sequences per worker and step."""

    def config(self, world: World, strategy: str) -> RunConfig:
        """What a user would write."""
        return RunConfig(
            model=lambda: make_transformer(self.size),
            loss=loss,
            optimizer=adamw,
            data=dataset(4 * self.batch * world.size),
            global_batch=self.batch * world.size,
            strategy=strategy,
        )


Step = Callable[[], None]
"""Trains one step on."""


def torch_loop(world: World, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop a person writes by hand."""
    data = dataset(4 * case.batch * world.size)

    def step() -> None:
        rows = torch.arange(case.batch) + world.rank * case.batch
        batch = tuple(t[rows] for t in data.tensors)
        optimizer.zero_grad(set_to_none=True)
        total, count = loss(model(batch[0]), batch)
        (total / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def compute_loop(world: World, case: Case) -> Step:
    """The same with no communication at all: the limit of a worker that shares the machine with the others."""
    model = make_transformer(case.size)
    return torch_loop(world, case, model, adamw(list(model.parameters())))


def shoal_context(world: World, case: Case, strategy: str) -> StepContext:
    """What a step of Shoal needs."""
    return build(case.config(world, strategy), world, record="")[1]


def shoal_loop(world: World, case: Case, strategy: str) -> Step:
    """A strategy at work."""
    return make_stepper(shoal_context(world, case, strategy))
