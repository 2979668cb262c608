"""Row-wise optimizers: torch's arithmetic where every row has a gradient, and each row by itself where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from shoal.server.protocol.state_machine import Refused
from shoal.server.rows.row_optimizers import RULES, RowOptimizer

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.02}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.5, "maximize": True}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.02, "initial_accumulator_value": 0.2}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.02}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.02, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "momentum": 0.9, "weight_decay": 0.02}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
]
IDS = [f"{kind}-{'-'.join(settings)}" for kind, settings in CASES]


def torch_optimizer(kind: str, settings: dict[str, Any], tensor: torch.Tensor) -> optim.Optimizer:
    made: optim.Optimizer = getattr(optim, kind)([tensor], **settings)
    return made


def description(optimizer: optim.Optimizer) -> dict[str, Any]:
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return {"kind": type(optimizer).__name__, "groups": [group]}


class Table:
    """Rows with the state that a shard would keep beside them."""

    def __init__(self, rows: torch.Tensor, described: Any) -> None:
        self.optimizer = RowOptimizer.of(described)
        self.rows = rows.clone()
        self.state = {name: torch.zeros_like(rows) for name in self.optimizer.state}
        self.steps = torch.zeros(len(rows), dtype=torch.int32)

    def step(self, ids: torch.Tensor, gradient: torch.Tensor, share: float = 1.0) -> None:
        rows, state = self.rows[ids], {name: held[ids] for name, held in self.state.items()}
        self.optimizer.update(rows, gradient.clone(), state, self.steps[ids], share)
        self.rows[ids] = rows
        for name, held in state.items():
            self.state[name][ids] = held
        self.steps[ids] += 1


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=IDS)
def test_all_rows_in_all_steps_are_torchs(kind: str, settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(13, 5, dtype=torch.float64, generator=generator))
    dense = torch_optimizer(kind, settings, whole)
    table = Table(whole.detach(), description(dense))
    everything = torch.arange(13)
    for number in range(40):
        if number == 20:  # as a schedule does
            dense.param_groups[0]["lr"] *= 0.3
            table.optimizer = table.optimizer.with_settings(description(dense)["groups"])
        gradient = torch.randn(13, 5, dtype=torch.float64, generator=generator)
        whole.grad = gradient.clone()
        dense.step()
        table.step(everything, gradient)
    torch.testing.assert_close(table.rows, whole.detach(), rtol=1e-12, atol=1e-12)
    own = dense.state[whole]
    for name, held in table.state.items():
        torch.testing.assert_close(held, own[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=IDS)
def test_each_row_counts_its_own_steps(kind: str, settings: dict[str, Any]) -> None:
    """A row that is touched now and then is where it would be if it were alone in the world."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    single = [nn.Parameter(row.clone()) for row in start]
    alone = [torch_optimizer(kind, settings, row) for row in single]
    table = Table(start, description(alone[0]))
    for _ in range(30):
        ids = torch.nonzero(torch.rand(6, generator=generator) < 0.4).view(-1)
        gradient = torch.randn(len(ids), 4, dtype=torch.float64, generator=generator)
        table.step(ids, gradient)
        for at, row in enumerate(ids.tolist()):
            single[row].grad = gradient[at].clone()
            alone[row].step()
    torch.testing.assert_close(
        table.rows, torch.stack([row.detach() for row in single]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=IDS)
def test_single_precision_is_close(kind: str, settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    whole = nn.Parameter(torch.randn(9, 33, generator=generator))
    dense = torch_optimizer(kind, settings, whole)
    table = Table(whole.detach(), description(dense))
    for _ in range(10):
        gradient = torch.randn(9, 33, generator=generator)
        whole.grad = gradient.clone()
        dense.step()
        table.step(torch.arange(9), gradient)
    torch.testing.assert_close(table.rows, whole.detach(), rtol=1e-5, atol=1e-6)


def test_share_scales_the_learning_rate() -> None:
    one, two = (Table(torch.ones(2, 3), {"kind": "AdamW", "groups": [{"lr": lr}]}) for lr in (0.05, 0.1))
    one.step(torch.arange(2), torch.ones(2, 3))
    two.step(torch.arange(2), torch.ones(2, 3), share=0.5)
    assert torch.equal(one.rows, two.rows)


@pytest.mark.parametrize("kind", ["Rprop", "Muon", "LBFGS", "", None])
def test_a_kind_without_a_rule_is_refused(kind: Any) -> None:
    with pytest.raises(
        Refused, match=r"^\w* ?has no rule for single rows; use SGD, Adagrad, Adam, AdamW, RMSprop"
    ):
        RowOptimizer.of({"kind": kind, "groups": [{"lr": 0.1}]})


@pytest.mark.parametrize(
    "groups",
    [
        None,
        [],
        [{"lr": 0.1}, {"lr": 0.2}],
        [{}],
        [{"lr": "0.1"}],
        [{"lr": 0.1, "betas": [0.9]}],
        [{"lr": 1, "eps": None}],
    ],
)
def test_settings_from_outside_are_checked(groups: Any) -> None:
    with pytest.raises(Refused):
        RowOptimizer.of({"kind": "Adam", "groups": groups})


def test_settings_cannot_ask_for_state_that_is_not_there() -> None:
    made = RowOptimizer.of({"kind": "SGD", "groups": [{"lr": 0.1}]})
    with pytest.raises(Refused, match="need momentum_buffer"):
        made.with_settings([{"lr": 0.1, "momentum": 0.9}])
    assert made.with_settings([{"lr": 0.2}]).settings["lr"] == 0.2


def test_rules_are_named_after_torchs_classes() -> None:
    assert all(issubclass(getattr(optim, name), optim.Optimizer) for name in RULES)
