"""Optimizers as plain values: there and back is the same optimizer, and only torch's own go there."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn, optim

from shoal.errors import ConfigError
from shoal.optimizer import ELEMENTWISE, move_optimizer
from shoal.server.dense.trained_vector import Trained, VectorPiece
from shoal.server.protocol.optimizer_description import KINDS, describe, optimizer_from, settings_of
from shoal.server.protocol.state_machine import Refused

SPECIAL: dict[type[optim.Optimizer], dict[str, Any]] = {
    optim.SGD: {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    optim.Adam: {"amsgrad": True, "betas": (0.8, 0.95)},
    optim.AdamW: {"weight_decay": 0.3, "maximize": True},
    optim.RMSprop: {"centered": True, "momentum": 0.5},
    optim.Adagrad: {"initial_accumulator_value": 0.25, "lr_decay": 0.01},
    optim.Rprop: {"etas": (0.4, 1.3)},
    optim.NAdam: {"decoupled_weight_decay": True, "weight_decay": 0.2},
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in (5, 3, 4)]


def made(kind: Any, tensors: list[nn.Parameter]) -> optim.Optimizer:
    groups = [{"params": tensors[:2]}, {"params": tensors[2:], "lr": 0.05, "note": "mine"}]
    optimizer: optim.Optimizer = kind(groups, lr=0.01, **SPECIAL.get(kind, {}))
    return optimizer


def run(optimizer: optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = torch.randn(tensor.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_there_and_back(kind: type[optim.Optimizer]) -> None:
    ours, theirs = parameters(), parameters()
    before = made(kind, ours)
    description = json.loads(json.dumps(describe(before)))
    assert "note" not in description["groups"][1], "what users add for themselves stays with them"
    tensors = [[p.detach() for p in theirs[:2]], [p.detach() for p in theirs[2:]]]
    after = optimizer_from(description, tensors)
    assert type(after) is kind
    names = [["0", "1"], ["2"]]
    reference = move_optimizer(before, names, {str(i): [p.detach()] for i, p in enumerate(ours)})
    ready = [(one, dict(one.state)) for one in (reference, after)]
    for (
        one,
        _,
    ) in ready:  # momentum that has been made ready; a user's optimizer has none when servers take it over
        one.state.clear()
    assert describe(reference) == describe(after)
    for one, state in ready:
        one.state.update(state)
    run(reference)
    run(after)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_every_elementwise_optimizer_has_its_name() -> None:
    assert list(KINDS.values()) == list(ELEMENTWISE)


class AdamW(optim.AdamW):
    """A user's own, under the name of torch's."""

    elementwise = True


@pytest.mark.parametrize("kind", [AdamW, optim.SparseAdam, optim.Adafactor, optim.LBFGS])
def test_others_are_refused_on_the_worker(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not one of them; use SGD, .* such as ddp\.$"):
        describe(kind(parameters()))


def test_a_tensor_is_no_number() -> None:
    optimizer = optim.SGD(parameters(), lr=torch.tensor(0.1))
    with pytest.raises(ConfigError, match="lr of group 0 is a tensor"):
        describe(optimizer)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "Adm"}, "did you mean"),
        ({"kind": "os.system"}, "unknown optimizer"),
        ({"groups": []}, "0 groups and the tensors 1"),
        ({"groups": [{"lr": 0.1, "rate": 2}]}, "no setting 'rate'"),
        ({"groups": [{"lr": "0.1"}]}, "is not a number"),
        ({"groups": [{"betas": [0.9, "x"]}]}, "is not a number"),
    ],
)
def test_servers_check_what_comes(change: dict[str, Any], sentence: str) -> None:
    description = {**describe(optim.Adam(parameters())), **change}
    with pytest.raises((ConfigError, Refused), match=sentence):
        optimizer_from(description, [[torch.zeros(2)]])


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.RMSprop])
def test_what_is_meant_for_cards_runs_on_servers(kind: type[optim.Optimizer]) -> None:
    """torch refuses `capturable` on a CPU in mid-step, and a worker on a card may well ask for it."""
    optimizer: Any = kind([nn.Parameter(torch.zeros(3))], lr=0.1, capturable=True)  # type: ignore[call-arg]
    trained = Trained(torch.zeros(3), [VectorPiece(0, 3, 0)], describe(optimizer))
    trained.check(settings_of(optimizer))
    trained.set(settings_of(optimizer))
    trained.step(torch.ones(3), None, 1.0, None, 1.0)
    assert bool((trained.values < 0).all())
