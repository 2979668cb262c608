"""The user's optimizer, moved onto the tensors an exchange really updates.

The user's factory gets ordinary parameters and may sort them into groups as it likes. We keep its groups and
settings and put our own tensors in place of each parameter: the parameter itself where a worker updates all of
it, or the piece of it that lies in the worker's slice. Pieces are right only for optimizers that treat each
element alone; ELEMENTWISE lists torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim

from shoal.cost import StateBytes
from shoal.errors import ConfigError
from shoal.torch_private import divides_by_scale, foreach_clamp_max_, foreach_clamp_min_, foreach_mul_

MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]

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
"""These have one kernel for the whole update, where the plain loop runs a dozen for each tensor."""
_FIRST = "initial_accumulator_value"


def check_trainable(model: nn.Module) -> None:
    """Refuse a model that learns nothing."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no trainable parameter; set requires_grad on what should learn.")


def make_optimizer(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    """Call the user's factory and check what it returns."""
    # A stage of a pipeline may have nothing to learn; its optimizer has the same groups, all empty.
    made = make(list(parameters.values()) or [nn.Parameter(torch.zeros(1))])
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


def state_bytes(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, StateBytes]:
    """What the user's optimizer will keep of each parameter: found by one step on tensors without memory.

    >>> state_bytes(lambda params: optim.AdamW(params, lr=0.1), {"w": nn.Parameter(torch.zeros(3, 2))})
    {'w': StateBytes(each=8, once=4)}
    """
    stand_ins = {
        name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        for name, p in parameters.items()
    }
    made = make_optimizer(make, stand_ins)
    for group in made.param_groups:
        if group.get("fused"):
            group["fused"] = False  # the kernel needs real memory, and keeps the same
    for p in stand_ins.values():
        p.grad = torch.empty_like(p) if p.requires_grad else None
    made.step()
    return {name: _kept_of(p, made.state.get(p, {})) for name, p in stand_ins.items()}


def _kept_of(parameter: torch.Tensor, state: Mapping[str, object]) -> StateBytes:
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    each = {key for key, value in tensors.items() if value.shape == parameter.shape and key != "step"}
    return StateBytes(
        sum(tensors[key].itemsize for key in each),
        sum(value.nbytes for key, value in tensors.items() if key not in each),
    )


def names_in_groups(
    optimizer: optim.Optimizer, parameters: Mapping[str, nn.Parameter], model: nn.Module
) -> list[list[str]]:
    """Which trainable parameters the user's factory put into each group; frozen ones have no part in it."""
    if not parameters:
        return [[] for _ in optimizer.param_groups]
    name_of = {id(p): name for name, p in parameters.items()}
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "optimizer= holds a parameter that is not the model's; build it from the parameters it is given, as in "
            "lambda params: torch.optim.AdamW(params, lr=3e-4)."
        )
    return [[name_of[id(p)] for p in group["params"] if id(p) in name_of] for group in optimizer.param_groups]


def refuse_sparse(optimizer: optim.Optimizer, exchange: str) -> None:
    """Exchanges that keep gradients in flat vectors call this."""
    if isinstance(optimizer, optim.SparseAdam):
        raise ConfigError(
            f"{exchange} keeps gradients dense, and SparseAdam takes sparse ones only; use AdamW, or solo."
        )


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
    """This optimizer over other tensors: `tensors` has, by name, what takes the place of each parameter."""
    groups = [
        {**group, "params": [t for name in here for t in tensors.get(name, ())]}
        for group, here in zip(optimizer.param_groups, names, strict=True)
    ]
    for group in groups:
        group.pop("param_names", None)
    kind: Any = type(optimizer)
    # Adagrad alone takes this from its constructor and not from the group.
    first = {_FIRST: optimizer.defaults[_FIRST]} if kind is optim.Adagrad else {}
    if kind in FUSED and all(_may_fuse(group) for group in groups):
        for group in groups:
            group["fused"] = True
        made: optim.Optimizer = kind(groups, fused=True, **first)
        prepare_momentum(made)
        return made
    if kind in ELEMENTWISE:
        plain: optim.Optimizer = kind(groups, **first)
        return plain
    # An optimizer we do not know: keep the object, which may carry settings of its own, and swap its tensors.
    for old, new in zip(optimizer.param_groups, groups, strict=True):
        old["params"] = new["params"]
    return optimizer


def _may_fuse(group: Mapping[str, object]) -> bool:
    forced = (
        group.get("fused") or group.get("foreach") or group.get("capturable") or group.get("differentiable")
    )
    tensors = group["params"]
    assert isinstance(tensors, list)
    # The first momentum is not dampened; see prepare_momentum for what that would need here.
    dampened = group.get("momentum") and group.get("dampening")
    allowed = group.get("fused") is not False and all(t.is_floating_point() for t in tensors)
    return bool(allowed and not forced and not dampened)


def prepare_momentum(optimizer: optim.Optimizer) -> None:
    """Start fused SGD's momentum at zero: its kernel cannot take a tensor that joins later than others.

    The result is the same: the first momentum is the gradient either way.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, optim.SGD) and group["fused"] and group["momentum"]:
            for tensor in group["params"]:
                optimizer.state[tensor].setdefault("momentum_buffer", torch.zeros_like(tensor))


def step_scaled(
    optimizer: optim.Optimizer, held: Callable[[], list[torch.Tensor]], factor: float, limit: float | None
) -> None:
    """One optimizer step on gradient × factor, clamped to ±limit. `held` gives the vectors that hold the gradient."""
    scale = found = None
    if factor != 1.0 or limit is not None:
        gradients = held()
        fused = divides_by_scale(optimizer)
        single = all(g.dtype == torch.float32 for g in gradients)  # the kernel keeps its scale in float32
        if limit is None and fused and single and gradients:
            # The fused kernel divides as it reads, which saves a pass over all gradients.
            scale = torch.full((), 1.0 / factor, device=gradients[0].device)
            found = torch.zeros((), device=gradients[0].device)
        elif gradients:
            foreach_mul_(gradients, factor)
            if limit is not None:
                foreach_clamp_min_(gradients, -limit)
                foreach_clamp_max_(gradients, limit)
    # The fused kernels look for these two attributes, which torch's class does not declare.
    for name, value in (("grad_scale", scale), ("found_inf", found)):
        setattr(optimizer, name, value)
    optimizer.step()
