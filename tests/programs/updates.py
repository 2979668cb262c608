"""More kinds of program: optimizers that look at whole parameters, and loops that change weights by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from programs import Simple, entropy, mean_entropy, mlp, points, sgd, simple


class Orthogonal(torch.optim.Optimizer):
    """As Muon: the update of a matrix is its momentum with singular values that are nearly one."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                update = momentum
                if p.ndim == 2:
                    update = momentum / momentum.norm()
                    for _ in range(4):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                p.sub_(update, alpha=group["lr"])


class OneScale(torch.optim.Optimizer):
    """As Prodigy: one scale for all parameters, by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in given if p.grad is not None]).sum().sqrt()
        for p in given:
            assert p.grad is not None
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


def hooked(params: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-0.02, 0.02)

    made.register_step_pre_hook(clamp)
    return made


def by_place(params: Any) -> torch.optim.Optimizer:
    """The first layers at another rate, by their place in the list."""
    given = list(params)
    return torch.optim.SGD([{"params": given[:3], "lr": 0.01}, {"params": given[3:]}], lr=0.1)


def optimizer(name: str, says: str, make: Any) -> None:
    simple(name, says, Simple(mlp, points, entropy, mean_entropy, make))


optimizer("whole matrices", "an optimizer that looks at whole matrices, as Muon does", Orthogonal)
optimizer("one scale for all", "an optimizer with one scale for all parameters, as Prodigy", OneScale)
optimizer("optimizer hooks", "register_step_pre_hook on the optimizer", hooked)
optimizer("groups by place", "groups made from params[:3] and params[3:]", by_place)


def _clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.15, 0.15)


def by_hand(name: str, says: str, change: Any) -> None:
    def after(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        del number, optimizer
        change(model)

    simple(
        name,
        says,
        Simple(mlp, points, entropy, mean_entropy, sgd, also={"after_step": after}),
        drive=lambda run: change(run.module),
        alone_in=("shared",),
    )


by_hand("weights clamped", "p.clamp_() on run.module in the loop", _clamp)


class TwoNames(nn.Module):
    """Two parameters in the same memory, which torch does not know to be one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def double(self) -> TwoNames:
        super().double()
        self.b.weight.data = self.a.weight.data
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


simple(
    "tied by .data",
    "b.weight.data = a.weight.data",
    Simple(TwoNames, points, entropy, mean_entropy),
)
