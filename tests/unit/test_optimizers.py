"""Optimizers that are not as torch makes them: kept as they are, tried, or refused where a worker has a part only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import ConfigError
from shoal.exchange.buckets.users_optimizer import users_optimizer
from shoal.exchange.setup import Setup
from shoal.optimizer import (
    ELEMENTWISE,
    Update,
    additions,
    is_known,
    outlines,
    refuse_unless_by_parameter,
    refuse_unless_elementwise,
    try_update,
)
from shoal.server.protocol.optimizer_description import describe
from shoal.world.world import World


class _Own(optim.Optimizer):
    """Subclasses say what they make of a list of gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, given: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for p, change in zip(given, self.change(given), strict=True):
                p.sub_(change, alpha=group["lr"])


class Elements(_Own):
    def change(self, given: list[Tensor]) -> list[Tensor]:
        return [p.grad.tanh() for p in given if p.grad is not None]


class Norms(_Own):
    """As LARS."""

    def change(self, given: list[Tensor]) -> list[Tensor]:
        return [p.grad * p.norm() / (p.grad.norm() + 1e-9) for p in given if p.grad is not None]


class Rows(_Own):
    """As Adafactor, or gradients that are centred."""

    def change(self, given: list[Tensor]) -> list[Tensor]:
        return [
            p.grad - p.grad.mean(-1, keepdim=True) if p.ndim > 1 else p.grad
            for p in given
            if p.grad is not None
        ]


class Together(_Own):
    """As Prodigy."""

    def change(self, given: list[Tensor]) -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in given if p.grad is not None]).norm()
        return [p.grad / norm for p in given if p.grad is not None]


class Noisy(_Own):
    def change(self, given: list[Tensor]) -> list[Tensor]:
        return [p.grad + torch.randn_like(p) for p in given if p.grad is not None]


class Listed(_Own):
    """Goes through a list of its own."""

    def __init__(self, params: Any) -> None:
        self.mine = list(params)
        super().__init__(self.mine)
        self.param_groups[0]["params"] = [nn.Parameter(torch.zeros(2))]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(1.0))]


ALONE = Update(joins_elements=False, joins_parameters=False, draws=False)


@pytest.mark.parametrize("kind", [*ELEMENTWISE, Elements])
def test_elements_alone(kind: Callable[..., optim.Optimizer]) -> None:
    assert try_update(kind(parameters(), lr=0.1)) == ALONE


def test_what_joins() -> None:
    one = try_update(Norms(parameters()))
    rows = try_update(Rows(parameters()))
    both = try_update(Together(parameters()))
    assert one == rows == Update(joins_elements=True, joins_parameters=False, draws=False)
    assert both is not None
    assert both.joins_parameters
    assert try_update(optim.Adafactor(parameters())) == one
    assert try_update(optim.Muon([nn.Parameter(torch.randn(7, 3))])) == one
    assert try_update(Listed(parameters())) is None


def test_a_trial_leaves_no_trace() -> None:
    given = parameters()
    made = Norms(given)
    before, standing = [p.detach().clone() for p in given], torch.get_rng_state()
    try_update(made)
    assert all(map(torch.equal, given, before))
    assert torch.equal(standing, torch.get_rng_state())
    assert not made.state
    assert all(p.grad is None for p in given)


@pytest.mark.parametrize("kind", [Norms, Rows, Together, Noisy])
def test_a_class_that_only_says_elementwise(kind: type[_Own]) -> None:
    says = type("Says", (kind,), {"elementwise": True})
    with pytest.raises(ConfigError, match="says `elementwise = True`, and zero2 cuts"):
        refuse_unless_elementwise(says(parameters()), "zero2")
    with pytest.raises(ConfigError, match="is not known to treat each element alone"):
        refuse_unless_elementwise(kind(parameters()), "zero2")
    refuse_unless_elementwise(type("True_", (Elements,), {"elementwise": True})(parameters()), "zero2")


def test_stages_take_what_treats_each_parameter_alone() -> None:
    for made in (Norms(parameters()), optim.Adafactor(parameters()), optim.Adam(parameters())):
        refuse_unless_by_parameter(made)
    for kind in (Together, Noisy):
        with pytest.raises(ConfigError, match="the stages of a pipeline update their own parameters"):
            refuse_unless_by_parameter(kind(parameters()))
    with pytest.raises(ConfigError, match="is not known to do so"):
        refuse_unless_by_parameter(Listed(parameters()))
    refuse_unless_by_parameter(type("Says", (Listed,), {"by_parameter": True})(parameters()))


def _clamped(optimizer: optim.Optimizer, *_: object) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.clamp_(-0.01, 0.01)


def hooked(params: Any) -> optim.Optimizer:
    made = optim.SGD(params, lr=0.1)
    made.register_step_pre_hook(_clamped)
    return made


def patched(params: Any) -> optim.Optimizer:
    made = optim.SGD(params, lr=0.1)
    own = made.step

    def step(closure: Any = None) -> None:
        _clamped(made)
        own(closure)

    made.step = step  # type: ignore[method-assign,assignment]
    return made


def filled(params: Any) -> optim.Optimizer:
    made = optim.SGD(params, lr=0.1, momentum=0.9)
    for p in made.param_groups[0]["params"]:
        made.state[p]["momentum_buffer"] = torch.full_like(p, 0.3)
    return made


ADDED = pytest.mark.parametrize("make", [hooked, patched, filled])


@ADDED
def test_what_is_put_onto_an_optimizer_stays(make: Callable[[Any], optim.Optimizer]) -> None:
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    model, plain = (nn.Linear(3, 2, dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    run = shoal.Run(
        model=model,
        loss=lambda output, batch: F.mse_loss(output, batch[1]),
        optimizer=make,
        data=TensorDataset(x, y),
        global_batch=8,
        strategy="solo",
        precision="fp64",
        shuffle=False,
        log=None,
        progress=False,
    )
    made = make(list(plain.parameters()))
    for _ in run.steps(3):
        made.zero_grad()
        F.mse_loss(plain(x), y).backward()
        made.step()
    torch.testing.assert_close(run.state_dict(), plain.state_dict(), rtol=0, atol=1e-14)


@ADDED
def test_and_is_refused_where_it_would_see_slices_or_be_lost(make: Callable[[Any], optim.Optimizer]) -> None:
    made = make(parameters())
    assert additions(made)
    with pytest.raises(ConfigError, match="zero1 cuts parameters into slices, and SGD has"):
        refuse_unless_elementwise(made, "zero1")
    with pytest.raises(ConfigError, match="and SGD has"):
        refuse_unless_by_parameter(made)
    with pytest.raises(ConfigError, match="servers make the optimizer anew, and SGD has"):
        describe(made)


def test_adagrad_begins_with_state_of_its_own() -> None:
    assert not additions(optim.Adagrad(parameters()))
    assert is_known(optim.Adagrad(parameters()))
    assert not is_known(hooked(parameters()))


def test_a_stage_calls_the_function_with_all_parameters_in_their_order() -> None:
    whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 2))
    stage = nn.ModuleDict({"2": whole[2]})
    stand_ins = outlines(whole)

    def by_place(params: list[nn.Parameter]) -> optim.Optimizer:
        return optim.SGD([{"params": params[:5], "lr": 0.5}, {"params": params[5:]}], lr=0.1)

    setup = Setup(stage, by_place, World.alone(), elsewhere=stand_ins)
    made, groups = users_optimizer(setup, dict(stage.named_parameters()), "ddp", slices=False)
    assert groups == [["2.weight"], ["2.bias"]]
    assert [len(group["params"]) for group in made.param_groups] == [5, 1]


def test_a_stage_without_anything_to_learn_has_the_same_groups() -> None:
    whole = nn.Linear(2, 3)
    setup = Setup(nn.Tanh(), partial(optim.SGD, lr=0.1), World.alone(), elsewhere=outlines(whole))
    assert users_optimizer(setup, {}, "ddp", slices=False)[1] == [[]]
