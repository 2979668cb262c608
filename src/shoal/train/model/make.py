"""The model that the user gave, or the one that the user's factory makes: the same on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shoal import seeds
from shoal.deferred_init import CannotDefer, build_deferred
from shoal.errors import ConfigError
from shoal.pipeline.trim import trimmed_away
from shoal.torch_private import buffers_of, parameters_of
from shoal.world.world import World

MakeModel = Callable[[], nn.Module]
Values = Callable[[str], torch.Tensor]

MODEL = "give an nn.Module or a function of no arguments that returns one."


def make_model(
    given: nn.Module | MakeModel, seed: int, dtype: torch.dtype | None, deferred: bool
) -> tuple[nn.Module, Values | None]:
    """The model in training mode, whole; or, `deferred` and where that can be done, without memory: then a function
    gives the initial value of one tensor at a time. With a factory, initial values are keyed by name."""
    if isinstance(given, nn.Module):
        return _typed(given, dtype), None

    def make() -> nn.Module:
        made: object = given()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model= made a {type(made).__name__}; {MODEL}")
        return made

    if deferred:
        try:
            found = build_deferred(make, seed)
        except CannotDefer:
            pass  # a factory that looks at values as it makes them: then the whole model it is
        else:
            model = _typed(found.model, dtype)
            dtypes = {n: t.dtype for n, t in [*model.named_parameters(), *model.named_buffers()]}
            return model, lambda name: found.value(name).to(dtypes[name])
    return _typed(seeds.build_by_name(make, seed), dtype), None


def _typed(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    gone = trimmed_away(model)
    if gone is not None:
        raise ConfigError(
            f"another Run has divided the model into stages ('{gone}' is on another worker); make the model anew, or "
            "give model= a function that makes it."
        )
    check_keras(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"the model has parameters without a size ('{name}'); give its sizes, as in nn.Linear(8, 4) for "
                "nn.LazyLinear(4)."
            )
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"another Run has cut the model's parameters ('{name}' is a part on this worker); make the model anew, "
                "or give model= a function that makes it."
            )
    if dtype is not None:
        _widen(model, dtype)
    return to_training(model)


def check_keras(model: nn.Module) -> None:
    """Refuse layers of Keras with state or losses of their own.

    They take `training=True` for what other modules are told by `train()`, so dropout would stay off; their running
    statistics and seeds are parameters, which each worker would have its own of; their regularisers are in
    `model.losses`, which no loss function sees. Others, such as Dense, are modules like any.
    """
    for name, layer in _keras_layers(model):
        kept = [str(getattr(one, "path", one)) for one in getattr(layer, "non_trainable_variables", ())]
        what = f"'{kept[0]}', which is no parameter that learns" if kept else ""
        if not what and list(getattr(layer, "losses", ())):
            what = "losses of its own (model.losses)"
        if what:
            raise ConfigError(
                f"the model has layers of Keras{f' ({name})' if name else ''} with {what}; Shoal would leave dropout "
                "off and regularisers out, and each worker would have statistics of its own. Write these layers with "
                "torch.nn, or train with Keras' own fit."
            )


def _keras_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost of them, which know what is inside."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if any(kind.__module__.partition(".")[0] == "keras" for kind in type(module).__mro__):
            if id(module) not in inside:
                yield name, module
            inside |= {id(one) for one in module.modules()}


def to_training(model: nn.Module) -> nn.Module:
    """Into training mode, but for the layers of a training model that the script holds in evaluation mode.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> _ = model[1].eval()
    >>> to_training(model)[1].training
    False
    """
    still = [module for module in model.modules() if not module.training] if model.training else []
    model.train()  # which a model may have changed, to hold some layers in evaluation mode
    for module in still:
        module.training = False
    return model


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """While it lasts the model is in evaluation mode; afterwards every layer is in its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Numbers in this format, and complex ones in that of the same width: `to` alone would drop what is imaginary."""
    tables: list[dict[str, Any]] = []
    for module in model.modules():
        tables += [parameters_of(module), buffers_of(module)]
    held = [
        (table, name, t) for table in tables for name, t in table.items() if t is not None and t.is_complex()
    ]
    wide = {id(t): t.detach().to(dtype.to_complex()) for _, _, t in held}
    with warnings.catch_warnings():  # which `to` says
        warnings.simplefilter("ignore")
        model.to(dtype)
    for table, name, tensor in held:
        if isinstance(tensor, nn.Parameter):
            tensor.data = wide[id(tensor)]
        else:
            table[name] = wide[id(tensor)]


def agree_on_model(model: nn.Module, world: World) -> None:
    """All ranks must have the same parameters and buffers; then all take rank 0's values.

    A model without memory has no values yet: they follow from the seed.
    """
    if world.size == 1:
        return
    mine = [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()]
    mine += [[n, list(b.shape), str(b.dtype), True] for n, b in model.named_buffers()]
    everyone = world.gather_values(mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ConfigError(_disagreement(everyone[0], theirs, rank))
    with torch.no_grad():
        tensors = [t for t in [*model.parameters(), *model.buffers()] if t.numel() and not t.is_meta]
        for handle in [world.broadcast(t.detach()) for t in tensors]:
            handle.wait()


def _disagreement(first: list[Any], other: list[Any], rank: int) -> str:
    remedy = "build the same model on every rank."
    for a, b in zip(first, other, strict=False):
        if a != b:
            return f"ranks disagree on the model: rank 0 has {_line(a)}, rank {rank} has {_line(b)}; {remedy}"
    longer, owner = (first, 0) if len(first) > len(other) else (other, rank)
    extra = longer[min(len(first), len(other))]
    return f"ranks disagree on the model: only rank {owner} has {_line(extra)}; {remedy}"


def _line(entry: list[Any]) -> str:
    name, shape, dtype, learns = entry
    return f"'{name}' {shape} {dtype.removeprefix('torch.')}{'' if learns else ' frozen'}"
