"""The user's optimizer, moved onto the tensors an exchange really updates.

The user's factory gets ordinary parameters and may sort them into groups as it likes. We keep its groups and
settings and put our own tensors in place of each parameter: the parameter itself where a worker updates all of
it, or the piece of it that lies in the worker's slice. Pieces are right only for optimizers that treat each
element alone; ELEMENTWISE lists torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from shoal.cost import StateBytes
from shoal.errors import ConfigError
from shoal.torch_private import (
    divides_by_scale,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    step_hooks_of,
)

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
BY_PARAMETER = (optim.Adafactor, optim.Muon, optim.SparseAdam)
"""Others of torch's, which treat each parameter alone."""
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
"""These have one kernel for the whole update, where the plain loop runs a dozen for each tensor."""
_FIRST = "initial_accumulator_value"


def check_trainable(model: nn.Module) -> None:
    """Refuse a model that learns nothing."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no trainable parameter; set requires_grad on what should learn.")


def outlines(model: nn.Module) -> dict[str, nn.Parameter]:
    """What stands for the parameters that learn: the same shapes, and no memory."""
    return {
        name: nn.Parameter(torch.empty_like(p, device="meta"))
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def make_optimizer(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    """Call the user's factory and check what it returns."""
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
    optimizer: optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    model: nn.Module,
    elsewhere: Sequence[nn.Parameter] = (),
) -> list[list[str]]:
    """Which trainable parameters the user's factory put into each group; frozen ones have no part in it.

    `elsewhere`: what stands for parameters that other workers have.
    """
    if not parameters and not elsewhere:
        return [[] for _ in optimizer.param_groups]
    name_of = {id(p): name for name, p in parameters.items()}
    known = {id(p) for p in (*model.parameters(), *elsewhere)}
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


def refuse_unless_elementwise(optimizer: optim.Optimizer, who: str, remedy: str = "use ddp") -> None:
    """Exchanges that cut parameters call this."""
    kind, name = type(optimizer), type(optimizer).__name__
    if added := additions(optimizer):
        raise ConfigError(f"{who} cuts parameters into slices, and {name} has {added}; {remedy}.")
    if kind in ELEMENTWISE:
        return
    if not getattr(kind, "elementwise", False):
        raise ConfigError(
            f"{who} cuts parameters into slices, and {name} is not known to treat each element alone; "
            f"{remedy}, or set `elementwise = True` on the class {name} if it does."
        )
    seen = try_update(optimizer)
    if seen is not None and (seen.joins_elements or seen.joins_parameters or seen.draws):
        what = "draws random numbers" if seen.draws else "makes the update of one depend on others"
        raise ConfigError(
            f"{name} says `elementwise = True`, and {who} cuts parameters into slices; but tried on a few elements it "
            f"{what}: take that line out, and {remedy}."
        )


def refuse_unless_by_parameter(optimizer: optim.Optimizer) -> None:
    """Stages of a pipeline call this: each updates its own parameters."""
    kind, why = type(optimizer), ""
    seen = None if kind in (*ELEMENTWISE, *BY_PARAMETER) else try_update(optimizer)
    if added := additions(optimizer):
        why = f"has {added}; leave ppN out"
    elif seen is not None and (seen.joins_parameters or seen.draws):
        why = "draws random numbers" if seen.draws else "makes the update of one depend on others"
        why = f"{why}; leave ppN out"
    elif kind in (*ELEMENTWISE, *BY_PARAMETER) or seen is not None:
        return
    elif not getattr(kind, "by_parameter", getattr(kind, "elementwise", False)):
        why = "is not known to do so; leave ppN out, or set `by_parameter = True` on its class if it does"
    if why:
        raise ConfigError(
            f"the stages of a pipeline update their own parameters, each by itself, and {kind.__name__} {why}."
        )


def is_known(optimizer: optim.Optimizer) -> bool:
    """Whether it is one of torch's and nothing has been put onto it: it draws no random numbers, for one."""
    return type(optimizer) in (*ELEMENTWISE, *BY_PARAMETER) and not _changed_step(optimizer)


def additions(optimizer: optim.Optimizer) -> str:
    """What the user has put onto an optimizer besides its settings, in words; empty: nothing.

    >>> parameter = nn.Parameter(torch.zeros(1))
    >>> made = optim.SGD([parameter], lr=0.1)
    >>> handle = made.register_step_pre_hook(lambda *_: None)
    >>> additions(optim.SGD([parameter], lr=0.1)), additions(made)
    ('', 'hooks on its step, which may look at whole parameters')
    """
    if changed := _changed_step(optimizer):
        return f"{changed}, which may look at whole parameters"
    kept = list(optimizer.state.values())
    if isinstance(optimizer, optim.Adagrad):  # its constructor fills the state
        kept = [entries for entries in kept if float(entries.get("step", 0)) > 0]
    return "state already, of whole parameters" if kept else ""


def _changed_step(optimizer: optim.Optimizer) -> str:
    if "step" in vars(optimizer):
        return "a step() of its own"
    return "hooks on its step" if step_hooks_of(optimizer) else ""


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
    if additions(optimizer):
        kind = None  # hooks, state and a step() of its own stay with the object
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
    # Not as torch makes it: keep the object, which may carry what only its author knows, and swap its tensors.
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


# What an optimizer that nobody knows does with its parameters: tried on small stand-ins. One half of the values and
# gradients is replaced by others; if the other half comes out differently, the update looks at more than its own. Three
# steps cannot prove that it does not, but they catch what is written every day: a norm of the parameter (LAMB, LARS),
# products of matrices (Muon, Shampoo), one scale for all (Prodigy).

_STEPS = 3
_SMALL = 4096
"""A parameter of so many elements has a stand-in of its own shape."""
_WIDEST = 6
"""Of a larger one, each dimension is at most so large."""

Halves = Callable[[int, Tensor], Tensor]
"""Number and stand-in of a parameter -> which of its elements are replaced by others."""


@dataclass(frozen=True)
class Update:
    """What has been seen of an optimizer's update."""

    joins_elements: bool
    """The update of an element depends on other elements."""
    joins_parameters: bool
    """The update of a parameter depends on other parameters."""
    draws: bool
    """It uses torch's global generator."""


def try_update(optimizer: optim.Optimizer) -> Update | None:
    """Try it on stand-ins, without a trace; None where it cannot be tried.

    >>> try_update(optim.SGD([nn.Parameter(torch.ones(3, 2))], lr=0.1))
    Update(joins_elements=False, joins_parameters=False, draws=False)
    """
    with torch.random.fork_rng(devices=[]):
        try:
            before, drawn = _run(optimizer, lambda _, like: torch.zeros_like(like, dtype=torch.bool))
            if not any(moved for _, moved in before):
                return None  # it updates other tensors than those in its groups
            elements, _ = _run(optimizer, _some_elements)
            parameters, _ = _run(optimizer, _every_other)
        except Exception:  # code of the user's own, on shapes that it did not expect
            return None
    alike = [_alike(a, b, _some_elements(i, a)) for i, ((a, _), (b, _)) in _pairs(before, elements)]
    apart = [_alike(a, b, _every_other(i, a)) for i, ((a, _), (b, _)) in _pairs(before, parameters)]
    return Update(not all(alike), not all(apart), drawn)


Found = list[tuple[Tensor, bool]]
"""Each parameter after the steps, and whether it has moved."""


def _pairs(one: Found, other: Found) -> Any:
    return enumerate(zip(one, other, strict=True))


def _some_elements(_: int, like: Tensor) -> Tensor:
    """About half of them, in no pattern: rows and columns all lose some."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(like.shape, generator=generator, device="cpu") < 0.5


def _every_other(number: int, like: Tensor) -> Tensor:
    return torch.full(like.shape, bool(number % 2), dtype=torch.bool, device="cpu")


def _alike(one: Tensor, other: Tensor, replaced: Tensor) -> bool:
    return torch.allclose(one[~replaced], other[~replaced], rtol=1e-5, atol=1e-9, equal_nan=True)


def _run(optimizer: optim.Optimizer, halves: Halves) -> tuple[Found, bool]:
    """A few steps of a copy."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    values, others = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    mine = [nn.Parameter(_draw(p, values)) for p in given]
    masks = [halves(number, p) for number, p in enumerate(mine)]
    for p, mask in zip(mine, masks, strict=True):
        p.data[mask] = _draw(p, others)[mask]
    tried = _copied(optimizer, given, mine)
    first = [p.detach().clone() for p in mine]
    torch.manual_seed(0)
    standing = torch.get_rng_state()
    for _ in range(_STEPS):
        for p, mask in zip(mine, masks, strict=True):
            p.grad = torch.where(mask, _draw(p, others), _draw(p, values))
        tried.step()
    found = [(p.detach(), not torch.equal(p.detach(), was)) for p, was in zip(mine, first, strict=True)]
    return found, not torch.equal(standing, torch.get_rng_state())


def _draw(like: Tensor, generator: torch.Generator) -> Tensor:
    shape = like.shape if like.numel() <= _SMALL else [min(size, _WIDEST) for size in like.shape]
    return torch.randn(shape, generator=generator, device="cpu").to(like.dtype)


def _copied(
    optimizer: optim.Optimizer, given: Sequence[Tensor], mine: Sequence[nn.Parameter]
) -> optim.Optimizer:
    """The optimizer over other parameters. Its class says how it is pickled, and leaves out what it does not know."""
    memo: dict[int, Any] = {id(p): stand_in for p, stand_in in zip(given, mine, strict=True)}
    made: optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(optimizer).items()})
    return made
