"""The user's optimizer, moved onto the tensors an exchange really updates.

The user's factory gets ordinary parameters and may sort them into groups as it likes. We keep its groups and
settings and put our own tensors in place of each parameter: the parameter itself where a worker updates all of
it, or the piece of it that lies in the worker's slice. Pieces are right only for optimizers that treat each
element alone; ELEMENTWISE lists torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn, optim

from shoal.errors import ConfigError
from shoal.exchange.base import MakeOptimizer

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
"""These have one kernel for the whole update, five times faster than the plain loop on a CPU."""


def make_optimizer(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    """Call the user's factory and check what it returns."""
    if not parameters:
        raise ConfigError("the model has no trainable parameter; set requires_grad on what should learn.")
    made = make(list(parameters.values()))
    if not isinstance(made, optim.Optimizer):
        raise ConfigError(
            f"optimizer= returned {type(made).__name__}; give a function of the parameters that returns a "
            "torch optimizer, such as lambda params: torch.optim.AdamW(params, lr=3e-4)."
        )
    if isinstance(made, optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss many times in a step, which no exchange can do; use another."
        )
    return made


def names_in_groups(optimizer: optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Which parameters the user's factory put into each group."""
    name_of = {id(p): name for name, p in parameters.items()}
    return [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def refuse_unless_elementwise(optimizer: optim.Optimizer, exchange: str) -> None:
    """Exchanges that cut parameters call this."""
    if type(optimizer) in ELEMENTWISE or getattr(type(optimizer), "elementwise", False):
        return
    name = type(optimizer).__name__
    raise ConfigError(
        f"{exchange} cuts parameters into slices, and {name} is not known to treat each element alone; "
        f"use ddp, or set `elementwise = True` on the class {name} if it does."
    )


def move_optimizer(
    optimizer: optim.Optimizer,
    names: Sequence[Sequence[str]],
    tensors: Mapping[str, Sequence[torch.Tensor]],
) -> optim.Optimizer:
    """The same optimizer over other tensors: for each parameter named in a group, what stands in its place."""
    groups = [
        {**group, "params": [t for name in here for t in tensors.get(name, ())]}
        for group, here in zip(optimizer.param_groups, names, strict=True)
    ]
    for group in groups:
        group.pop("param_names", None)
    if type(optimizer) in FUSED and all(_may_fuse(group) for group in groups):
        for group in groups:
            group["fused"] = True
        return type(optimizer)(groups, fused=True)  # type: ignore[call-arg]
    if type(optimizer) in ELEMENTWISE:
        return type(optimizer)(groups)  # type: ignore[call-arg]
    # An optimizer we do not know: keep the object, which may carry settings of its own, and swap its tensors.
    for old, new in zip(optimizer.param_groups, groups, strict=True):
        old["params"] = new["params"]
    return optimizer


def _may_fuse(group: Mapping[str, object]) -> bool:
    asked = (
        group.get("fused") or group.get("foreach") or group.get("capturable") or group.get("differentiable")
    )
    tensors = group["params"]
    assert isinstance(tensors, list)
    return not asked and group.get("fused") is not False and all(t.is_floating_point() for t in tensors)


def step_scaled(
    optimizer: optim.Optimizer, gradients: Sequence[torch.Tensor], factor: float, limit: float | None
) -> None:
    """One optimizer step on gradient × factor, clamped to ±limit. `gradients` are the vectors that hold it."""
    scale = found = None
    if factor != 1.0 or limit is not None:
        fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        single = all(g.dtype == torch.float32 for g in gradients)  # the kernel keeps its scale in float32
        if limit is None and fused and single and gradients:
            # The fused kernel divides as it reads, which saves a pass over all gradients.
            scale = torch.full((), 1.0 / factor, device=gradients[0].device)
            found = torch.zeros((), device=gradients[0].device)
        else:
            torch._foreach_mul_(list(gradients), factor)
    if limit is not None:
        torch._foreach_clamp_min_(list(gradients), -limit)
        torch._foreach_clamp_max_(list(gradients), limit)
    optimizer.grad_scale, optimizer.found_inf = scale, found  # type: ignore[attr-defined]
    optimizer.step()
