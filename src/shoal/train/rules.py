"""Rules that need more than the plan: what the model is, and what the exchange turned out to be."""

from __future__ import annotations

from shoal import exchange
from shoal.config import fill_options
from shoal.data.source import is_stream
from shoal.errors import ConfigError
from shoal.exchange.base import Exchange
from shoal.plan.check import compressor_of
from shoal.train.divide import Divided
from shoal.train.order import Order
from shoal.types import Plan


def check_fit(order: Order, plan: Plan, made: Exchange, divided: Divided) -> None:
    """Refuse what cannot work with this exchange and this model."""
    _check_meetings(order, plan, made)
    _check_ties(plan, divided)


def _check_meetings(order: Order, plan: Plan, made: Exchange) -> None:
    """Refuse what needs all workers at every step, where they need not be there."""
    if made.meets_after > 1 and (order.batchnorm == "sync" or is_stream(order.data)):
        what = "batchnorm='sync'" if order.batchnorm == "sync" else "a stream"
        raise ConfigError(
            f"{what} under {plan}: with a quorum a slow worker leaves steps out, and {what} cannot; use quorum=1."
        )


def _check_ties(plan: Plan, divided: Divided) -> None:
    """Refuse what would let the copies of one weight, which several stages hold, drift apart."""
    options: object = fill_options(plan.exchange, exchange.TABLE.look_up(plan.exchange.name).Options)
    if divided.ties and (compressor_of(plan) is not None or getattr(options, "fragments", 1) > 1):
        raise ConfigError(
            f"{plan}: a weight that several stages share would travel with other neighbours from each, and its copies "
            "drift apart; leave the compressor and fragments out, or the pipeline, or untie the weight."
        )
