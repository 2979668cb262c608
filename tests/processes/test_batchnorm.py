"""Batch normalisation over several workers, against torch's own on the whole batch in one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.blocks import find_blocks
from shoal.errors import ConfigError
from shoal.testing.parity import take_step
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.model.recompute import recompute_blocks
from shoal.train.model.sync_batchnorm import Presence, has_batchnorm, sync_batchnorm
from shoal.train.run_config import RunConfig
from shoal.world.world import World

SHARES = {2: (5, 0), 3: (1, 7, 3), 4: (4, 0, 1, 6)}
"""Samples of each worker; a worker without any runs a filler."""

KINDS = {"1d": nn.BatchNorm1d, "1d long": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}
SHAPES = {"1d": (3,), "1d long": (3, 4), "2d": (3, 4, 2), "3d": (3, 2, 2, 2)}
STEPS = 10

Seen = dict[str, list[Tensor]]


class Block(nn.Module):
    """Something to learn below and above a normalisation."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 3))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(torch.einsum("nc...,cd->nd...", x, self.mix)))


def make(kind: str, options: dict[str, Any]) -> nn.Module:
    """Several layers in a row, the first of them on the data itself."""
    torch.manual_seed(3)
    norm = KINDS[kind]
    model = nn.Sequential(norm(3, **options), *(Block(norm(3, **options)) for _ in range(2))).double()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("weight" in name), std=0.4)
    return model


def batch(kind: str, step: int, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return 3 + 5 * torch.randn(samples, *SHAPES[kind], generator=generator, dtype=torch.float64)


def loss_of(output: Tensor) -> Tensor:
    weight = torch.linspace(-1, 2, output[0].numel(), dtype=output.dtype).view_as(output[0])
    return (output.sin() * weight + output.square() * 0.1).sum() / output[0].numel()


def note(seen: Seen, **values: Tensor | None) -> None:
    for name, value in values.items():
        assert value is not None, name
        seen.setdefault(name, []).append(value.detach().clone())


def reference(kind: str, samples: int, options: dict[str, Any]) -> Seen:
    model, seen = make(kind, options), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(STEPS):
        x = batch(kind, step, samples).requires_grad_()
        optimizer.zero_grad()
        output = model(x)
        loss_of(output).backward()
        note(seen, output=output, x=x.grad)
        note(seen, **{f"gradient of {name}": p.grad for name, p in model.named_parameters()})
        note(seen, **dict(model.named_buffers()))
        optimizer.step()
    note(seen, **model.state_dict())
    return seen


def work(world: World, kind: str, shares: Sequence[int], options: dict[str, Any], recompute: bool) -> Seen:
    presence = Presence(counts=shares[world.rank] > 0)
    model, seen = sync_batchnorm(make(kind, options), world, presence), Seen()
    if recompute:
        recompute_blocks(model, find_blocks(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    first = sum(shares[: world.rank])
    for step in range(STEPS):
        whole = batch(kind, step, sum(shares))
        mine = (
            whole[first : first + shares[world.rank]] if presence.counts else torch.full_like(whole[:1], 1e6)
        )
        x = mine.clone().requires_grad_()
        optimizer.zero_grad()
        output = model(x)
        (loss_of(output) * presence.counts).backward()
        note(seen, output=output, x=x.grad)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            world.all_reduce(parameter.grad).wait()
            note(seen, **{f"gradient of {name}": parameter.grad})
        note(seen, **dict(model.named_buffers()))
        optimizer.step()
    note(seen, **model.state_dict())
    return seen


def compare(shares: Sequence[int], kind: str, options: dict[str, Any], recompute: bool = False) -> None:
    expected = reference(kind, sum(shares), options)
    results = spawn(work, len(shares), kind, shares, options, recompute)
    for rank, seen in enumerate(results):
        assert seen.keys() == expected.keys()
        for name in seen.keys() - {"output", "x"}:
            assert all(torch.equal(a, b) for a, b in zip(seen[name], results[0][name], strict=True)), (
                f"rank 0 and rank {rank} hold different bits of {name}"
            )
        if shares[rank] == 0:
            assert not any(gradient.any() for gradient in seen["x"]), "a filler has a gradient"
    counted = [seen for seen, share in zip(results, shares, strict=True) if share]
    for name, values in expected.items():
        for step, value in enumerate(values):
            parts = [seen[name][step] for seen in counted]
            mine = torch.cat(parts) if name in ("output", "x") else parts[0]
            torch.testing.assert_close(mine, value, rtol=1e-12, atol=1e-12, msg=f"{name}, step {step}")


@pytest.mark.parametrize("kind", ["1d", "2d"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_equals_one_process(workers: int, kind: str) -> None:
    compare(SHARES[workers], kind, {})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("1d long", {"momentum": None}),
        ("2d", {"track_running_stats": False}),
        ("3d", {"affine": False}),
        ("1d", {"bias": False, "eps": 0.1}),
    ],
    ids=["cumulative", "no running statistics", "not affine", "no bias"],
)
def test_every_option(kind: str, options: dict[str, Any]) -> None:
    compare(SHARES[3], kind, options)


def test_with_recomputation() -> None:
    compare(SHARES[2], "2d", {}, recompute=True)


def modes(world: World) -> None:
    """What does not train: evaluation, forward passes without gradients, copies, a micro-batch of nobody."""
    torch.manual_seed(0)
    mine, theirs = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    presence = Presence()
    sync_batchnorm(mine, world, presence)
    whole = torch.randn(5, 3, dtype=torch.float64)
    x = whole[:4] if world.rank == 0 else whole[4:]
    with torch.no_grad():
        theirs(whole), mine(x)
    torch.testing.assert_close(mine.running_var, theirs.running_var, rtol=1e-14, atol=0)
    assert int(mine.num_batches_tracked) == 1

    twin = copy.deepcopy(mine)
    presence.counts = False
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    x = x.clone().requires_grad_()
    output = twin(x)
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad is not None
    assert not x.grad.any()
    assert twin.weight.grad is not None
    assert not twin.weight.grad.any()
    assert all(torch.equal(before[name], value) for name, value in twin.state_dict().items())
    presence.counts = True

    far = (
        whole.mul(1024).round().div(1024)
    )  # so that adding 2**20 is exact: sums of squares would lose all digits
    near = nn.BatchNorm1d(3).double()
    twin = sync_batchnorm(nn.BatchNorm1d(3).double(), world, presence)
    part = slice(0, 4) if world.rank == 0 else slice(4, 5)
    torch.testing.assert_close(twin(far[part] + 2**20), near(far)[part], rtol=0, atol=1e-9)
    torch.testing.assert_close(twin.running_var, near.running_var, rtol=0, atol=1e-9)

    mine.eval()
    theirs.eval()
    if world.rank == 0:  # evaluation is each worker's own affair: nobody else needs to come
        torch.testing.assert_close(mine(whole), theirs(whole), rtol=1e-13, atol=1e-13)
        lone = sync_batchnorm(nn.BatchNorm1d(3, track_running_stats=False).eval(), world, presence)
        torch.testing.assert_close(lone(whole.float()), nn.BatchNorm1d(3)(whole.float()))

    mine.train()
    presence.counts = world.rank == 0
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        mine(whole[:1])
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        mine(whole[0])


def test_modes() -> None:
    spawn(modes, 2)


def half(world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Half precision in and out, and a layer of SyncBatchNorm."""
    norm = sync_batchnorm(nn.SyncBatchNorm(3), world, Presence())
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(6, 3, 2, generator=generator).bfloat16()
    x = whole[:2] if world.rank == 0 else whole[2:]
    x = x.clone().requires_grad_()
    output = norm(x)
    output.float().square().sin().sum().backward()
    assert output.dtype == torch.bfloat16
    assert x.grad is not None
    return output.detach(), x.grad, norm.running_var


def test_half_precision() -> None:
    norm = nn.BatchNorm1d(3)
    x = torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    output = norm(x)
    output.float().square().sin().sum().backward()
    results = spawn(half, 2, backend="gloo")
    assert x.grad is not None
    torch.testing.assert_close(torch.cat([row[0] for row in results]), output.detach())
    torch.testing.assert_close(torch.cat([row[1] for row in results]), x.grad, rtol=0.02, atol=0.01)
    torch.testing.assert_close(results[0][2], norm.running_var)


def test_one_worker_computes_the_same_bits_as_torch() -> None:
    mine, theirs = make("2d", {}), make("2d", {})
    sync_batchnorm(mine, World.alone(), Presence())
    x = batch("2d", 0, 4)
    assert torch.equal(mine(x), theirs(x))
    assert all(torch.equal(a, b) for a, b in zip(mine.buffers(), theirs.buffers(), strict=True))


def test_layers_stay_themselves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.InstanceNorm2d(4, affine=True))
    norm, parameters, state = model[1], list(model.parameters()), model.state_dict()
    assert has_batchnorm(model)
    for _ in range(2):  # a second time, with other workers, is no harm
        assert sync_batchnorm(model, World.alone(), Presence()) is model
    assert model[1] is norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    assert type(model[3]) is nn.InstanceNorm2d
    assert has_batchnorm(model)
    assert not has_batchnorm(model[3])


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


@pytest.mark.parametrize("make_norm", [nn.LazyBatchNorm1d, lambda: Own(3)], ids=["lazy", "own forward"])
def test_a_layer_of_another_class_is_refused_and_nothing_changed(make_norm: Any) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), make_norm())
    with pytest.raises(ConfigError, match="cannot take over layer '1', a "):
        sync_batchnorm(model, World.alone(), Presence())
    assert type(model[0]) is nn.BatchNorm1d


def tracked(world: World, strategy: str) -> list[float]:
    """Batches that the layer has seen on each worker, where the second has samples in few steps."""
    x = torch.randn(33, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = RunConfig(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        loss=lambda output, batch: ((output - batch[1]) ** 2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(x, x[:, :1]),  # type: ignore[arg-type]
        global_batch=8,
        strategy=strategy,
        precision="fp64",
        partition="hash(k)",
        columns={"k": [7] * 33},
    )
    _, parts = build(order, world, record="")
    for number in range(3):
        take_step(parts, number)
    seen = float(dict(parts.model.named_buffers())["1.num_batches_tracked"])
    return world.gather_numbers([seen])[:, 0].tolist()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_filler_leaves_no_trace(strategy: str) -> None:
    """All samples have one key, so one worker has all of them and the other computes fillers of one sample."""
    assert sorted(spawn(tracked, 2, strategy)[0]) == [0.0, 3.0]
