"""Activation checkpointing: the same bits as without, and less kept for backward."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from shoal.blocks import find_blocks
from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.train.model.recompute import recompute_blocks
from shoal.world.world import World

WIDTH = 16


class Block(nn.Module):
    """Dropout, batch statistics, keyword arguments and a constant buffer."""

    def __init__(self, normalise: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        self.wide = normalise(nn.Linear(WIDTH, 4 * WIDTH))
        self.norm = nn.BatchNorm1d(4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, int]:
        inner = F.dropout(F.gelu(self.norm(self.wide(x))), 0.3, self.training)
        return x + scale * self.narrow(inner) * self.mask, 1


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x, scale=0.5)
        out: Tensor = self.head(x)
        return out


def pair(**options: Any) -> tuple[Net, Net]:
    """A model and its twin that recomputes."""
    torch.manual_seed(0)
    plain = Net(**options)
    other = copy.deepcopy(plain)
    recompute_blocks(other, find_blocks(other))
    return plain, other


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """All gradients, losses and, at the end, the whole state."""
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(100 + step)
        loss = model(torch.randint(0, 11, (32,))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        seen += [loss.detach(), torch.rand(())]  # the next random number is the same too
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return seen + list(model.state_dict().values())


@pytest.mark.parametrize("normalise", [lambda module: module, spectral_norm], ids=["plain", "spectral"])
def test_the_same_bits(normalise: Callable[[nn.Module], nn.Module]) -> None:
    plain, other = pair(normalise=normalise)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in other.named_parameters()]
    assert list(plain.state_dict()) == list(other.state_dict())
    expected, seen = train(plain), train(other)
    assert len(expected) == len(seen) > 40
    assert all(torch.equal(one, two) for one, two in zip(expected, seen, strict=True))


def test_evaluation_and_copies() -> None:
    plain, other = pair()
    twin = copy.deepcopy(other)
    expected = train(plain)
    assert all(torch.equal(one, two) for one, two in zip(expected, train(twin), strict=True))
    with torch.no_grad():
        for block in other.blocks:
            block.wide.weight.zero_()
            block.wide.bias.zero_()
    plain.eval(), twin.eval()
    tokens = torch.arange(11)
    with torch.no_grad():
        assert torch.equal(
            plain(tokens), twin(tokens)
        )  # a copy does not compute with the weights of its original


def kept_bytes(model: nn.Module) -> int:
    """The bytes that a forward pass keeps for backward, parameters aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, 11, (256,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens).sum()
    return sum(kept.values())


def test_less_is_kept() -> None:
    """A block keeps about 14 times its input; with recomputation only that."""
    plain, other = pair()
    assert kept_bytes(other) < kept_bytes(plain) / 5


def test_the_inside_of_one_block_at_a_time() -> None:
    """In backward too: what was computed again is gone before the next block is computed again."""
    _, other = pair()
    alive: set[int] = set()
    passes: list[tuple[int, int]] = []

    for number, block in enumerate(other.blocks):

        def note(_module: nn.Module, _inputs: Any, output: Tensor, number: int = number) -> None:
            key = len(passes)
            alive.add(key)
            weakref.finalize(output, alive.discard, key)
            passes.append((number, len(alive)))

        block.wide.register_forward_hook(note)
    other(torch.randint(0, 11, (32,))).sum().backward()
    assert passes == [(number, 1) for number in (0, 1, 2, 3, 3, 2, 1, 0)]


def test_a_model_without_blocks_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="finds no blocks in Linear"):
        recompute_blocks(model, find_blocks(model))


def sharded(world: World, recompute: bool) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(0)
    model = Net()
    if recompute:
        recompute_blocks(model, find_blocks(model))
    for block in model.blocks:
        fully_shard(block.narrow, mesh=mesh)  # a unit inside a block as well
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = train(model)
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in seen]


def test_under_fsdp2() -> None:
    for one, two in zip(*(spawn(sharded, 2, recompute)[0] for recompute in (False, True)), strict=True):
        assert torch.equal(one, two)
