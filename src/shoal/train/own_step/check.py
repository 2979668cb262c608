"""What a run with a step of its own needs, and what cannot go with it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shoal import exchange
from shoal.errors import ConfigError
from shoal.plan.check import compressor_of
from shoal.train.run_config import RunConfig
from shoal.types import Plan

_WITHOUT = (
    "model",
    "loss",
    "optimizer",
    "inputs",
    "accumulate",
    "recompute",
    "tensor_rules",
    "balance",
    "penalty",
    "buffers",
    "compile",
    "metrics",
    "ema",
    "recipes",
)
"""Fields of a run that the user's step does instead, or that would call it on parts of a batch."""


def check_own_step(config: RunConfig, plan: Plan) -> None:
    """Refuse what a run with `step=` cannot do, before anything is made."""
    if not callable(config.step):
        raise ConfigError(f"step= is a {type(config.step).__name__}; give a function of (ctx, batch).")
    _check_names(config)
    plain = RunConfig(data=config.data, global_batch=config.global_batch)
    for field in _WITHOUT:
        if getattr(config, field) != getattr(plain, field):
            raise ConfigError(
                f"{field}= does not go with step=, which computes losses and gradients itself, once for all of "
                "a worker's samples; leave it out."
            )
    if config.precision == "fp16":
        raise ConfigError(
            "precision='fp16' does not go with step=: its losses have no common scale; use bf16."
        )
    check_strategy(plan)


def check_strategy(plan: Plan) -> None:
    """Refuse a strategy under which several models cannot be exact."""
    can = [name for name, made in exchange.TABLE.items() if made.takes_own_step]
    parts = plan.tensor is not None or plan.pipeline is not None or compressor_of(plan) is not None
    if parts or plan.exchange.name not in can:
        raise ConfigError(
            f"{plan} cannot follow a step of your own, because several losses and models need whole parameters and "
            f"exact sums; use {', '.join(can[:-1])} or {can[-1]}, without tpN, ppN or a compressor."
        )


def _check_names(config: RunConfig) -> None:
    models, optimizers = config.models, config.optimizers
    for field, given in (("models", models), ("optimizers", optimizers)):
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(
                f'step= needs {field}=, a dict by name, such as models={{"gen": Gen, "disc": Disc}} and '
                'optimizers={"gen": make_optimizer, "disc": make_optimizer}.'
            )
        for name, one in given.items():
            if not callable(one):
                raise ConfigError(
                    f"{field}['{name}'] is a {type(one).__name__}; give a function that makes one."
                )
    for name in models:
        if not str(name).isidentifier() or hasattr(nn.ModuleDict, name):
            raise ConfigError(f"models['{name}']: give it a name made of letters, and not that of a method.")
    for name in optimizers:
        if name not in models:
            raise ConfigError(f"optimizers['{name}'] has no model; models are {', '.join(models)}.")
