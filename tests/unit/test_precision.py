"""The loss scale: down at an overflow, up after enough good steps, never out of bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.data.batch import convert
from shoal.errors import ConfigError
from shoal.train.model.make import make_model
from shoal.train.technique.precision import TABLE, LossScale


def test_the_scale_falls_and_rises_by_two() -> None:
    scale = LossScale(dynamic=True, grow_after=3)
    assert scale.value == 2.0**16
    scale.succeeded()
    scale.overflowed()
    assert (scale.value, scale.good_steps) == (2.0**15, 0)
    for _ in range(3):
        scale.succeeded()
    assert (scale.value, scale.good_steps) == (2.0**16, 0)


def test_the_scale_stays_in_bounds() -> None:
    scale = LossScale(dynamic=True, grow_after=1)
    for _ in range(100):
        scale.succeeded()
    assert scale.value == 2.0**24
    for _ in range(100):
        scale.overflowed()
    assert scale.value == 2.0**-24


def test_without_fp16_it_is_one_for_ever() -> None:
    scale = LossScale(dynamic=False, grow_after=1)
    for _ in range(5):
        scale.succeeded()
    assert scale.value == 1.0


def test_what_computes_in_which_format() -> None:
    cpu = torch.device("cpu")
    x = torch.ones(2, 2)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float32}
    for name, dtype in wanted.items():
        with TABLE[name].context(cpu):
            assert (x @ x).dtype == dtype, name
    assert [name for name, choice in TABLE.items() if choice.scaled] == ["fp16"]
    assert TABLE["fp64"].model == torch.float64
    with pytest.raises(ConfigError, match="unknown precision 'bf61'; did you mean 'bf16'"):
        TABLE.look_up("bf61")


def test_complex_parameters_stay_complex() -> None:
    """`precision="fp64"`, in which `shoal verify` compares: torch's own `to` would drop what is imaginary."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
            self.also = self.turn
            self.register_buffer("phase", torch.ones(4, dtype=torch.complex64) * 1j)
            self.last = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(((x @ self.turn) * self.phase).abs())
            return out

    given = Net()
    before = given.turn.detach().clone()
    model, _ = make_model(given, 0, torch.float64, deferred=False)
    assert {n: t.dtype for n, t in model.state_dict().items() if t.is_complex()} == {
        "turn": torch.complex128,
        "also": torch.complex128,
        "phase": torch.complex128,
    }
    assert model.also is model.turn is given.turn
    assert torch.equal(given.turn.detach().to(torch.complex64), before)
    x = convert(torch.randn(3, 4, dtype=torch.complex64), torch.device("cpu"), torch.float64)
    model(x).sum().backward()
    assert given.turn.grad is not None
