"""What a strategy would do to a model, as text: `shoal list tensor train.py`, `shoal list pipeline train.py`."""

from __future__ import annotations

from shoal.data.batch import convert, default_inputs
from shoal.data.loader import Feed, Loader
from shoal.errors import ConfigError
from shoal.pipeline.split import describe_split, find_split
from shoal.tensor import describe_cuts, find_cuts
from shoal.train import precision
from shoal.train.build import Order
from shoal.train.divide import Trial
from shoal.train.model import make_model
from shoal.world.world import World


def describe_model(order: Order, question: str) -> str:
    """The answer to "tensor 2" (cut in two) or "pipeline 4" (in four stages), found as a run would find it."""
    what, _, number = question.partition(" ")
    trial = _trial(order)
    with trial.calm():
        if what == "tensor":
            return describe_cuts(find_cuts(trial.model, trial.run, int(number), order.tensor_rules))
        if what == "pipeline":
            return describe_split(find_split(trial.model, trial.inputs(trial.batch), int(number)))
    raise ConfigError(f"nothing is known about '{what}' of a model; ask for tensor or pipeline.")


def _trial(order: Order) -> Trial:
    chosen = precision.TABLE.look_up(order.precision)
    world = World.alone()
    model, _ = make_model(order.model, order.seed, chosen.model, lazily=False)
    feed = Feed(order.data, order.global_batch, 0, 1, order.accumulate, order.seed, collate=order.collate)
    batch = convert(Loader(feed).take(0).batches[0], world.device, chosen.model)
    return Trial(model, batch, order.inputs or default_inputs, order.loss, chosen, world.device)
