"""From a checkpoint back to a run: tensors, the place in the data, learning rate, loss scale, random streams."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shoal.checkpoint.load import Reader
from shoal.data.source import BatchSource
from shoal.errors import ConfigError
from shoal.train.state.progress import Progress
from shoal.train.state.run_state import restore, restore_optimizer, restore_owned, restore_rows
from shoal.train.step_context import StepContext
from shoal.train.technique.learning_rate import set_rates

_KINDS: dict[str, tuple[type, ...]] = {
    "optimizer": (str, type(None)),
    "orders": (list,),
    "scale": (int, float, type(None)),
    "good_steps": (int,),
    "count_per_sample": (int, float),
    "schedule": (dict, type(None)),
    "cursor": (dict, type(None)),
}
"""What the state of every checkpoint has, and of which kinds."""
_MORE: dict[str, tuple[type, ...]] = {
    "streams": (dict,),
    "replicas": (int,),
    "holders": (int,),
    "numbers": (list,),
    "rates": (list, type(None)),
    "recipes": (dict,),
    "early_stop": (dict, type(None)),
    "best": (dict, type(None)),
}
"""What checkpoints that a run has written have beside that; one that was imported may lack it."""


def take_over(context: StepContext, reader: Reader) -> Progress:
    """Go on from this checkpoint, whose bytes have been checked. Every rank calls it."""
    state = reader.manifest.state
    _check_state(reader)
    restore(context.whole, reader)
    restore_rows(context.whole, reader)
    if state["optimizer"] is not None:
        _check_optimizer(context, reader)
        for order in state["orders"]:
            if set(order) == set(context.exchange.order):
                context.exchange.lay_out_again(order)
        restore_optimizer(context.whole, reader)
    restore_owned(context.whole, reader)
    if context.scale.dynamic and state["scale"] is not None:
        context.scale.value = state["scale"]
        context.scale.good_steps = state["good_steps"]
    context.count_per_sample = state["count_per_sample"]
    if len(state.get("numbers", ())) == context.mesh.data.size:
        own = state["numbers"][context.mesh.data.rank]
        context.count_per_sample = own.get("count_per_sample", context.count_per_sample)
        if context.scale.dynamic and own.get("scale") is not None:
            context.scale.value = own["scale"]
            context.scale.good_steps = own["good_steps"]
        context.exchange.load_numbers(own)
    by_module = state.get("streams", {}).get("by_module")
    if by_module is not None:
        context.streams.go_on(by_module)
    if state["cursor"] is not None:
        sentences = context.loader.go_on(reader.manifest.step, state["cursor"])
        before, now = state.get("sorted_by"), sorted_by(context)
        if before and now and before != now and state["cursor"]["position"]:
            sentences.append(
                f"this epoch was sorted by '{before}' and is sorted by '{now}' now: some of its samples come twice "
                "and others not at all"
            )
        for sentence in sentences if context.savers.rank == 0 else ():
            print(f"shoal: going on from {reader.folder}; {sentence}.", file=sys.stderr)
    context.balancing.go_on(reader.manifest.step, state.get("speeds"))
    sentences = []
    if state.get("rates"):
        set_rates(context.exchange.optimizer, state["rates"])
        sentences.append("learning rates are those that were set by run.optimizer")
    sentences += _other_features(state.get("features"), features_of(context))
    sentences += context.recipes.go_on(state.get("recipes", {}))
    for sentence in sentences if context.savers.rank == 0 else ():
        print(f"shoal: going on from {reader.folder}; {sentence}.", file=sys.stderr)
    return Progress(reader.manifest.step, state["schedule"], early_stop_was=state.get("early_stop"))


def _check_optimizer(context: StepContext, reader: Reader) -> None:
    before, now = reader.manifest.state["optimizer"], context.exchange.optimizer_kind
    if before != now:
        raise ConfigError(
            f"the checkpoint {reader.folder} was written with {before}, and optimizer= now makes "
            f"{now}; use the same optimizer, or another checkpoint folder."
        )


def _check_state(reader: Reader) -> None:
    """Refuse a state that no run has written."""
    state = reader.manifest.state
    needed = _KINDS | {key: kinds for key, kinds in _MORE.items() if key in state}
    for key, kinds in needed.items():
        right = key in state and isinstance(state[key], kinds)
        if key == "numbers" and right:
            right = all(isinstance(own, dict) for own in state[key])
        if not right:
            found = f"has {state[key]!r:.60} as" if key in state else "lacks"
            raise ConfigError(
                f"{reader.folder} {found} '{key}' of its state, so no run can go on from it; "
                "move it out of the folder, or choose another checkpoint folder."
            )


def features_of(context: StepContext) -> Mapping[str, Any]:
    """The fitted features of the data, if they have any."""
    data = context.loader.feed.data
    return data.features if isinstance(data, BatchSource) else {}


def _other_features(before: object, now: Mapping[str, Any]) -> list[str]:
    """What a model that was trained on some numbers should not meet in silence."""
    if not isinstance(before, Mapping):
        return []
    names = [name for name in before if dict(before)[name] != now.get(name)]
    if not names:
        return []
    return [
        f"feature '{names[0]}' of data= was fitted in another way than what the checkpoint was trained on"
        + (f", and {len(names) - 1} more" if len(names) > 1 else "")
    ]


def sorted_by(context: StepContext) -> str:
    """The column by which the order of samples is sorted in windows, if it is."""
    partition = context.loader.feed.partition
    return partition.keyed_by if partition.reach else ""
