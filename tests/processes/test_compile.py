"""`compile=`: the same numbers as without, under every exchange, or a sentence."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.errors import ConfigError
from shoal.testing.parity import ParityTrace, largest_difference, toy_order, trace_run
from shoal.testing.spawn import spawn
from shoal.testing.toys import Toy
from shoal.train.build import build
from shoal.train.model.compile_blocks import compile_blocks, compiler_for
from shoal.world.world import World

STEPS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.norm(torch.tanh(self.up(x))), 0.3, self.training)


class Counting(Layer):
    """Computes with a buffer and then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) * (1 + 0.1 * self.seen)
        if self.training:
            self.seen += len(x)
        return out


def stack(kind: type[nn.Module] = Layer) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), *(kind() for _ in range(3)), nn.Linear(8, 3))


def compiled() -> nn.Module:
    return torch.compile(stack(), backend="aot_eager")  # type: ignore[return-value]


def counting() -> nn.Module:
    return stack(Counting)


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("ddp", stack, {"compile": "aot_eager"}),
    ("zero3", stack, {"compile": "aot_eager"}),
    ("zero3", stack, {"compile": "aot_eager", "recompute": "blocks"}),
    ("shared", counting, {"compile": "aot_eager", "buffers": "sum"}),
    ("zero2", compiled, {}),
]


def train(world: World, strategy: str, model: Any, settings: dict[str, Any]) -> ParityTrace:
    config = toy_order(Toy("compiled", model), strategy)
    return trace_run(world, replace(config, model=model(), **settings), STEPS)


def run_pairs(world: World) -> list[tuple[ParityTrace, ParityTrace, int]]:
    found = []
    for strategy, model, settings in CASES:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        plain = stack if model is compiled else model
        without = {name: value for name, value in settings.items() if name != "compile"}
        first = train(world, strategy, plain, without)
        second = train(world, strategy, model, settings)
        found.append((first, second, torch._dynamo.utils.counters["frames"]["ok"]))
    return found


def test_equals_the_plain_model() -> None:
    for found in spawn(run_pairs, 2):
        for (strategy, model, _), (plain, ours, frames) in zip(CASES, found, strict=True):
            gap, where = largest_difference(plain, ours)
            assert gap < 1e-10, f"{strategy} {model.__name__}: {gap:.1e} at {where}"
            assert (frames > 0) is (model is not counting), "what changes a buffer stays as it is written"


def test_inductor_draws_what_the_plain_model_draws() -> None:
    plain, ours = (train(World.alone(), "ddp", stack, {"compile": on}) for on in (False, True))
    gap, where = largest_difference(plain, ours)
    assert gap < 1e-10, where


def test_a_copy_of_a_compiled_model_is_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    compiler = compiler_for("eager")
    assert compiler is not None
    compile_blocks(model, ["0", "1"], compiler, lambda: True)
    x = torch.ones(2, 3)
    kept = [model(x) for _ in range(2)]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[1].weight.zero_()
        other[1].bias.fill_(7.0)
    assert torch.equal(other(x), torch.full((2, 3), 7.0))
    assert torch.equal(other(x), torch.full((2, 3), 7.0))
    assert torch.equal(model(x), kept[1])


def called_inside() -> nn.Module:
    model = stack()
    model[1].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"compile": "tensorrt5"}, "compile='tensorrt5': torch has no such backend; it is one of"),
        ({"compile": "eager", "batchnorm": "sync"}, "compile with batchnorm='sync'"),
        ({"model": called_inside}, r"layer '1' was compiled with compile\(\), and hooks of a run"),
    ],
)
def test_refusals(settings: dict[str, Any], text: str) -> None:
    config = toy_order(Toy("compiled", stack), "ddp")
    with pytest.raises(ConfigError, match=text):
        build(replace(config, **settings), World.alone(), record="")


def be_refused(world: World, strategy: str) -> str:
    config = toy_order(Toy("compiled", stack), strategy)
    try:
        build(replace(config, compile="eager"), world, record="")
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def both(world: World) -> list[str]:
    return [be_refused(world, "ddp * tp2"), be_refused(world, "ddp * pp2")]


def test_layers_that_are_cut_are_not_compiled() -> None:
    for sentences in spawn(both, 2):
        assert [s.split(":")[0] for s in sentences] == ["compile under ddp * tp2", "compile under ddp * pp2"]


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match="compile=True needs a C\\+\\+ compiler, and there is no 'no-such-compiler'"
    ):
        compiler_for(True)
