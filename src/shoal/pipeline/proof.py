"""Does a model compute in stages what it computes whole? Each stage is run alone and compared, bit for bit.

A stage gets the activation that the whole model had at its begin, on a model trimmed to that stage: all that lies
before is NaN. A number that goes around the boundary, through a skip connection or an attribute that one module
writes and a later one reads, comes out as NaN or as a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shoal.call import call_model
from shoal.errors import ConfigError
from shoal.pipeline.spine import Calls, Interception, activation, call_of, undisturbed
from shoal.pipeline.stage import Stage, StageModule
from shoal.pipeline.trim import trimmed
from shoal.torch_private import tree_leaves, tree_map

RandomState = tuple[Tensor, Tensor | None]

DIFFERENT_PASSES = (
    "two passes of the model over one batch from one random state differ; let it draw random numbers from torch alone, "
    "and keep no state outside of its modules."
)


@dataclass(frozen=True)
class Truth:
    """What the whole model computed: at each place the activation and the state of the generators, then the output."""

    activations: Mapping[str, Tensor]
    states: Mapping[str | None, RandomState]
    output: object


def record(model: nn.Module, inputs: object, places: Sequence[str]) -> Truth:
    """Run the whole model once and keep what it has when it calls each of these modules."""
    activations: dict[str, Tensor] = {}
    states: dict[str | None, RandomState] = {}

    def _note(name: str, module: nn.Module, made: Calls, *args: object, **kwargs: object) -> object:
        carried = activation(module, args, kwargs)
        if carried is not None:
            activations[name] = carried.clone()  # the model may change it in place
        states[name] = _random_state()
        return made(*args, **kwargs)

    found = ((name, model.get_submodule(name)) for name in places)
    functions = {module: partial(_note, name, module, call_of(module)) for name, module in found}
    with undisturbed(model), Interception(functions):
        states[None] = _random_state()
        output = tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, call_model(model, inputs)
        )
    return Truth(activations, states, output)


@dataclass(frozen=True)
class Leak:
    """A boundary around which data goes, and the error that this led to, if it did."""

    boundary: str
    cause: Exception | None = None


def find_leak(model: nn.Module, inputs: object, stages: Sequence[Stage], truth: Truth) -> Leak | None:
    """The first boundary that the stages cannot be cut at, or None if they compute what the model computes."""
    with undisturbed(model) as put_back:
        for stage in stages:
            put_back()
            cause: Exception | None = None
            try:
                same = _same(_alone(model, inputs, stages, stage.number, truth), _expected(stage, truth))
            except Exception as error:  # whatever the model does with NaN is a reason not to cut here
                same = False
                cause = error
            if not same and stage.begin is not None:
                return Leak(stage.begin, cause)
            if not same:
                raise ConfigError(DIFFERENT_PASSES) from cause
    return None


def refusal(leak: Leak) -> ConfigError:
    """What to tell the user about a leak."""
    return ConfigError(
        f"the model carries data around '{leak.boundary}' that does not pass through it; "
        "split elsewhere, at modules that split= names."
    )


def prove(model: nn.Module, inputs: object, stages: Sequence[Stage]) -> None:
    """Raise a ConfigError unless the stages, one after the other, compute what the model computes.

    >>> from shoal.pipeline.spine import observe
    >>> from shoal.pipeline.stage import plan_stages
    >>> model, x = nn.Sequential(nn.Linear(3, 5), nn.Dropout(), nn.Linear(5, 2)), torch.ones(4, 3)
    >>> prove(model, x, plan_stages(model, observe(model, x), ["1", "2"]))
    """
    truth = record(model, inputs, [stage.begin for stage in stages if stage.begin is not None])
    leak = find_leak(model, inputs, stages, truth)
    if leak is not None:
        raise refusal(leak) from leak.cause


def _alone(model: nn.Module, inputs: object, stages: Sequence[Stage], number: int, truth: Truth) -> object:
    """What one stage gives for the true activation, on a model that has nothing else."""
    begin = stages[number].begin
    received = None if begin is None else truth.activations[begin].clone()
    # Weights of other stages are NaN here: if the stage used one, the result would show it.
    with trimmed(model, stages, {number}):
        return StageModule(model, stages[number], partial(_set_random_state, truth.states[begin]))(
            received, inputs
        )


def _expected(stage: Stage, truth: Truth) -> object:
    return truth.output if stage.end is None else truth.activations[stage.end]


def _same(one: object, other: object) -> bool:
    """Whether all tensors of two values are alike, bit for bit; other leaves, such as caches, are not looked at."""
    left, right = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in (one, other))
    return len(left) == len(right) and all(map(_equal, left, right))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # NaN equals NaN here: a model may have some of its own. `torch.equal` says otherwise.
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _random_state() -> RandomState:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if _cuda_in_use() else None


def _set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
