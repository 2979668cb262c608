"""Hooks on gradients, parameters that begin or cease to learn, other parameters, gradients of gradients: as one process
computes them, or refused in a sentence."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.errors import ConfigError
from shoal.testing.parity import take_step
from shoal.testing.spawn import SpawnError, spawn
from shoal.train.build import build
from shoal.train.model.gradient_hooks import COMPARED_EVERY, is_linear
from shoal.train.run_config import RunConfig
from shoal.train.step import run_step
from shoal.world.world import World

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.last(x)
        return out


class Borrowed(Net):
    """A layer called with parameters that are not its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            others = {name: 1.5 * p for name, p in layer.named_parameters()}
            x = torch.func.functional_call(layer, others, (x,))
        out: torch.Tensor = self.last(x)
        return out


class Penalised(Net):
    """Gives its input too, so that a loss can differentiate by it."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_(self.training)
        return super().forward(x), x


class Meta(Net):
    """Differentiates by its own parameters as it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        (slope,) = torch.autograd.grad(out.sum(), self.last.bias, create_graph=True)
        return out + 0.1 * slope / len(x)


def loss(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
    if isinstance(output, torch.Tensor):
        return ((output - batch[1]) ** 2).sum(), batch[1].numel()
    out, x = output
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return ((out - batch[1]) ** 2).sum() + slope.square().sum(), batch[1].numel()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(16, n, generator=generator) for n in (5, 3)))


def half(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def unit(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / gradient.norm()


def make(case: str) -> nn.Module:
    torch.manual_seed(3)
    kinds: dict[str, Callable[[], nn.Module]] = {"borrowed": Borrowed, "penalty": Penalised, "meta": Meta}
    model = kinds.get(case, Net)()
    weight = model.layers[1].up.weight
    if case in ("half", "unit"):
        weight.register_hook({"half": half, "unit": unit}[case])
    if case == "late":
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    if case == "module":
        model.layers[1].register_full_backward_hook(lambda _, into, __: (into[0] * 0.5,))
    if case == "unfreeze":
        model.layers[1].requires_grad_(False)
    return model


def between(case: str, model: nn.Module, step: int, rank: int = 0) -> None:
    """What the user does before a step."""
    layer = model.layers[1]
    if case == "thaw":  # learns when the run is made, and not at first
        layer.requires_grad_(step >= 2)
    if case == "unfreeze" and step == 2:
        layer.requires_grad_(True)
    if case == "freeze" and step == 2:
        layer.requires_grad_(False)
    if case == "freeze one" and step == 1 and rank == 0:
        layer.requires_grad_(False)
    if case == "hook later" and step == 1:
        layer.up.weight.register_hook(half)


def order(case: str, strategy: str, **settings: Any) -> RunConfig:
    return RunConfig(
        model=make(case),
        loss=loss,
        optimizer=sgd,
        data=samples(),
        global_batch=8,
        strategy=strategy,
        precision="fp64",
        shuffle=False,
        **settings,
    )


def plain(case: str) -> dict[str, torch.Tensor]:
    """The loop that a user writes, over whole batches."""
    model, data = make(case).double(), samples()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        between(case, model, step)
        batch = tuple(tensor[step % 2 * 8 :][:8].double() for tensor in data.tensors)
        total, count = loss(model(batch[0]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(world: World, case: str, strategy: str) -> dict[str, torch.Tensor]:
    parts = build(order(case, strategy), world, record="")[1]
    for step in range(COMPARED_EVERY + 1 if case == "freeze one" else STEPS):
        between(case, parts.model, step, world.rank)
        take_step(parts, step)
    return parts.whole.parameters()


EQUAL = [
    *(
        (case, name)
        for case in ("thaw", "freeze", "half", "borrowed", "penalty", "meta")
        for name in ("ddp", "zero2")
    ),
    *((case, "shared") for case in ("thaw", "half", "penalty")),
    *((case, "ddp * tp2") for case in ("thaw", "penalty", "module")),
    *((case, "ddp * pp2(microbatches=2)") for case in ("thaw", "half", "borrowed", "module")),
    ("module", "zero3"),
]


def run_equal(world: World) -> tuple[list[dict[str, torch.Tensor]], str]:
    said = io.StringIO()
    with redirect_stderr(said):
        found = [train(world, case, strategy) for case, strategy in EQUAL]
    return found, said.getvalue()


def test_equals_the_plain_loop() -> None:
    results = spawn(run_equal, 2)
    for found, _ in results:
        for (case, strategy), parameters in zip(EQUAL, found, strict=True):
            for name, wanted in plain(case).items():
                gap = float((parameters[name] - wanted).abs().max())
                assert gap < 1e-12, f"{case} under {strategy}: {gap:.1e} at {name}"
    assert (
        results[0][1].count("layer 'layers.1' has a backward hook, which is called for one micro-batch") == 3
    )
    assert "backward hook" not in results[1][1]


REFUSED = [
    (
        "unfreeze",
        "ddp",
        "parameter 'layers.1.down.bias' was unfrozen after Run was made, and ddp has gradients",
    ),
    ("unfreeze", "zero3", "parameter 'layers.1.up.weight' was unfrozen after Run was made, and zero3 cannot"),
    ("freeze", "zero3", "parameter 'layers.1.up.weight' was frozen after Run was made, and zero3 cannot"),
    ("freeze one", "zero2", "parameter 'layers.1.down.bias' is frozen "),
    ("freeze one", "local(2)", "parameter 'layers.1.up.weight' is frozen "),
    ("freeze one", "ddp * tp2", "parameter 'layers.1.up.weight' is frozen "),
    (
        "unit",
        "ddp",
        "has a gradient hook that is not linear, and under ddp gradients are sums over the 2 parts",
    ),
    ("late", "ddp", "has a post-accumulate-grad hook, and under ddp gradients are sums over the 2 parts"),
    ("half", "zero3", "has a gradient hook, and zero3 puts shards in the place of parameters"),
    ("hook later", "zero3", "has a gradient hook, and zero3 puts shards in the place of parameters"),
    ("half", "ddp * tp2", "has a gradient hook, and tp2 puts shards in the place of parameters"),
    ("borrowed", "zero3", "zero3: layer 'layers.0' is called with another 'weight' than its own"),
    ("penalty", "zero3", "zero3 frees parameters between forward and backward, and "),
    ("penalty", "ddp * pp2(microbatches=2)", "the model or its loss differentiates as it runs"),
]


def be_refused(world: World, case: str, strategy: str) -> str:
    try:
        train(world, case, strategy)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(("case", "strategy", "text"), REFUSED, ids=[f"{c}, {s}" for c, s, _ in REFUSED])
def test_refuses(case: str, strategy: str, text: str) -> None:
    try:
        sentences = spawn(be_refused, 2, case, strategy)
    except SpawnError as error:  # the one that waits for the other may not be told in time
        sentences = [str(error)]
    assert any(text in sentence for sentence in sentences), sentences


def freeze_under_ps(world: World) -> str:
    parts = build(order("freeze one", "ps(servers=1)"), world, record="")[1]
    try:
        while (view := parts.exchange.work.next(0, STEPS)) is not None:
            between("freeze one", parts.model, view.step, world.rank)
            run_step(parts, view)
    except ConfigError as error:
        return str(error)
    finally:
        parts.exchange.close()
    return "nothing was refused"


def test_under_ps_who_has_frozen_alone_finds_out() -> None:
    """The other goes on: servers give it the part of the one that ends."""
    found = spawn(freeze_under_ps, 2)
    assert found[0].startswith("parameter 'layers.1.down.bias' is frozen here and not on all 2 workers"), (
        found
    )


def test_alone_hooks_are_held_to_the_same() -> None:
    """The first step's gradients wait for their count: a hook sees them three times as large."""
    with pytest.raises(ConfigError, match="not linear, and under ddp gradients are sums over the 1 parts"):
        train(World.alone(), "unit", "ddp")
    found = train(World.alone(), "hook later", "ddp")
    for name, wanted in plain("hook later").items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)


def test_a_gradient_outside_of_a_step_is_the_users_own() -> None:
    parts = build(order("unfreeze", "ddp"), World.alone(), record="")[1]
    take_step(parts, 0)
    layer = parts.model.layers[1].requires_grad_(True)
    parts.model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert layer.up.weight.grad is not None
    layer.requires_grad_(False)
    take_step(parts, 1)


@pytest.mark.parametrize(
    ("hook", "linear"),
    [
        (half, True),
        (unit, False),
        (lambda _: None, True),
        (lambda g: g.mul_(2), True),
        (lambda g: g.clamp(-0.1, 0.1), False),
        (lambda g: g + 1, False),
    ],
)
def test_what_is_linear(hook: Any, linear: bool) -> None:
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        assert is_linear(hook, torch.zeros(4, 3, dtype=kind)) is linear
