"""Every rule about which strategies can work, in one table: refuse before any process starts, in one sentence.

A rule looks at a parsed Plan and the number of workers and returns a sentence, or None if it has no objection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal import compress, exchange, pipeline
from shoal.aggregate import make_aggregate
from shoal.compress.base import Compressor, Layout
from shoal.config import degree_of, fill_options, parse_strategy
from shoal.errors import ConfigError
from shoal.exchange.periodic.sync_interval import SyncInterval
from shoal.exchange.ps_worker.options import PsOptions
from shoal.pipeline.base import PipelineOptions
from shoal.tensor.cut import TensorOptions
from shoal.types import Plan, Promise

Rule = Callable[[Plan, int], str | None]
_TRIAL = Layout(1 << 40, torch.float32, torch.device("cpu"))
"""So large that every compressor does on it what it does on large vectors; nothing of it is made."""


def check_text(text: str, workers: int) -> Plan:
    """Parse a strategy and refuse it if it cannot work with so many workers.

    >>> print(check_text("zero2(bucket_mb=8)", workers=4))
    zero2(bucket_mb=8)
    >>> check_text("solo", workers=4)
    Traceback (most recent call last):
    shoal.errors.ConfigError: solo is one process alone; you have 4 workers. Use --workers 1, or ddp.
    """
    plan = parse_strategy(text)
    chosen = exchange.TABLE.look_up(plan.exchange.name)
    options: object = fill_options(plan.exchange, chosen.Options)
    compressor_of(plan)
    if plan.tensor is not None:
        fill_options(plan.tensor, TensorOptions)
    if not 0 < getattr(options, "bucket_mb", 1.0) < float("inf"):
        raise ConfigError(f"{plan.exchange}: bucket_mb must be a size above 0; 16 is a good one.")
    for rule in RULES:
        objection = rule(plan, workers)
        if objection is not None:
            raise ConfigError(objection)
    return plan


def check_device(plan: Plan, device: str) -> None:
    """Refuse a plan whose models lie in memory of the host, where workers compute on cards.

    >>> check_device(parse_strategy("zero1 * tp2"), "cuda")
    >>> check_device(parse_strategy("shared"), "cuda")
    Traceback (most recent call last):
    shoal.errors.ConfigError: shared keeps the model in host memory; on cards use ddp, zero1 or zero2.
    """
    name = plan.exchange.name
    if device != "cpu" and exchange.TABLE.look_up(name).in_host_memory:
        able = [
            other
            for other, kind in exchange.TABLE.items()
            if kind.compresses and kind.promise is Promise.EXACT
        ]
        able = [other for other in able if not exchange.TABLE[other].uses_servers]
        raise ConfigError(
            f"{name} keeps the model in host memory; on cards use {', '.join(able[:-1])} or {able[-1]}."
        )


def _workers_exist(plan: Plan, workers: int) -> str | None:
    return None if workers >= 1 else f"{plan} needs at least 1 worker; you have {workers}. Use --workers 1."


def _degrees_divide(plan: Plan, workers: int) -> str | None:
    cells = degree_of(plan.tensor) * degree_of(plan.pipeline)
    if cells == 0:
        return f"{plan}: a degree of 0 leaves nobody to do the work; use tp1 or pp1."
    if workers % cells:
        down = workers // cells * cells
        near = f"{down} or {down + cells}" if down else f"{cells}"
        product = " * ".join(str(c) for c in (plan.tensor, plan.pipeline) if c is not None)
        return f"{product} needs a multiple of {cells} workers; you have {workers}. Use --workers {near}."
    return None


def _solo_is_alone(plan: Plan, workers: int) -> str | None:
    if plan.exchange.name == "solo" and workers > 1:
        product = "".join(f" * {c}" for c in (plan.tensor, plan.pipeline) if c is not None)
        remedy = f"Use ddp{product}." if product else "Use --workers 1, or ddp."
        return f"solo is one process alone; you have {workers} workers. {remedy}"
    return None


def _schedule_fits(plan: Plan, workers: int) -> str | None:
    del workers
    if plan.pipeline is None:
        return None
    options = fill_options(plan.pipeline, PipelineOptions)
    chosen = pipeline.TABLE.look_up(options.schedule)
    ranks = degree_of(plan.pipeline)
    if chosen.stages_per_rank > 1 and exchange.TABLE.look_up(plan.exchange.name).cuts_parameters:
        return (
            f"{plan.exchange} gathers the layers of one stage a worker, and {options.schedule} has "
            f"{chosen.stages_per_rank}; use {plan.pipeline.name}(1f1b)."
        )
    return chosen.refuse(ranks, options.microbatches)


def _replicas_divide(plan: Plan, workers: int) -> str | None:
    data = workers // max(degree_of(plan.tensor) * degree_of(plan.pipeline), 1)
    replicas = replicas_of(plan)
    if replicas < 1 or data % replicas:
        return (
            f"{plan.exchange} puts {data} workers into {replicas} equal groups, which cannot be done; use "
            "replicas=1, or a number that divides them."
        )
    return None


def replicas_of(plan: Plan) -> int:
    """How many copies of the parameters an exchange that cuts them keeps."""
    chosen = exchange.TABLE.look_up(plan.exchange.name)
    if not chosen.cuts_parameters:
        return 1
    options: object = fill_options(plan.exchange, chosen.Options)
    return int(getattr(options, "replicas", 1))


def pipeline_options(plan: Plan) -> PipelineOptions:
    """What `ppN(...)` says; plain accumulation is a pipeline of one micro-batch."""
    if plan.pipeline is None or degree_of(plan.pipeline) == 1:
        return PipelineOptions("gpipe", 1)
    return fill_options(plan.pipeline, PipelineOptions)


def tensor_options(plan: Plan) -> TensorOptions:
    """What `tpN(...)` says."""
    return TensorOptions() if plan.tensor is None else fill_options(plan.tensor, TensorOptions)


def compressor_of(plan: Plan) -> Compressor | None:
    """What gradients go through on the wire; None where they travel as they are.

    >>> compressor_of(parse_strategy("ddp + none")), compressor_of(parse_strategy("ddp + int8"))
    (None, Int8(feedback=False))
    """
    made = compress.make_compressor(plan.compressor) if plan.compressor is not None else None
    return None if made is None or made.promise is Promise.EXACT else made


def promise_of(plan: Plan) -> Promise:
    """What a strategy guarantees about its numbers: the weakest promise of its pieces.

    >>> [promise_of(parse_strategy(text)).name for text in ("ddp", "ddp + int8", "local(8) + int8", "ps(ssp=2)")]
    ['EXACT', 'CLOSE', 'CONVERGES', 'CONVERGES']
    """
    made = compressor_of(plan)
    chosen = exchange.TABLE.look_up(plan.exchange.name)
    pieces = [chosen.promise, made.promise if made else Promise.EXACT]
    options: object = fill_options(plan.exchange, chosen.Options)
    if isinstance(options, PsOptions):
        pieces += [clock.promise for _, clock in options.clocks()] + [
            make_aggregate(options.aggregate).promise
        ]
    return max(pieces, key=list(Promise).index)


def _compressor_fits(plan: Plan, workers: int) -> str | None:
    del workers
    chosen = exchange.TABLE.look_up(plan.exchange.name)
    if plan.compressor is None or plan.compressor.name == "none" or plan.exchange.name == "solo":
        return None
    if not chosen.compresses:
        able = ", ".join(name for name, other in exchange.TABLE.items() if other.compresses)
        return f"{plan}: nothing can be compressed under {plan.exchange.name}; it can be under {able}."
    made = compressor_of(plan)
    if made is not None and made.tried and (chosen.updates_alone or chosen.uses_servers):
        return (
            f"{plan}: auto compares whole steps, which workers do not take together there; name a compressor."
        )
    if made is not None and chosen.uses_servers and made.code(_TRIAL).rounds > 1:
        return (
            f"{plan}: {plan.compressor.name} needs the sum of all workers on its way, and they meet at servers only; "
            "use int8 or topk(0.01)."
        )
    return None


def _quorum_fits(plan: Plan, workers: int) -> str | None:
    del workers
    options: object = fill_options(plan.exchange, exchange.TABLE.look_up(plan.exchange.name).Options)
    early = isinstance(options, SyncInterval) and options.quorum < 1
    if early and (plan.tensor is not None or plan.pipeline is not None):
        return (
            f"{plan}: with a quorum each worker may be at another step, and those who hold one model between them may "
            "not; use quorum=1, or leave tpN and ppN out."
        )
    return None


def _models_are_whole(plan: Plan, workers: int) -> str | None:
    del workers
    whole = exchange.TABLE.look_up(plan.exchange.name).whole_models
    if whole and (plan.tensor is not None or plan.pipeline is not None):
        return f"{plan}: {plan.exchange.name} keeps models whole; leave tpN and ppN out, or use ddp."
    return None


def _server_options_fit(plan: Plan, workers: int) -> str | None:
    options: object = fill_options(plan.exchange, exchange.TABLE.look_up(plan.exchange.name).Options)
    if not isinstance(options, PsOptions):
        return None
    chosen = make_aggregate(options.aggregate)
    alone = [str(clock) for _, clock in options.clocks() if not clock.together]
    if options.servers < 1 or not 1 <= options.copies <= options.servers:
        return (
            f"{plan.exchange}: {options.copies} replicas need as many servers, and there are {options.servers}; "
            f"use servers={max(options.copies, 1)}, or replicas={max(min(options.servers, 2), 1)}."
        )
    if alone and chosen.compares:
        return (
            f"{plan.exchange}: {options.aggregate} compares the parts of a step, and {alone[0]} applies each alone; "
            "use bsp, or aggregate=weighted."
        )
    # With tier=host it is hosts that are waited for. How many there are shows when they have met: WorkClaim checks it.
    if not 0 <= options.backup < workers or (options.backup and alone):
        return (
            f"{plan.exchange}: backup={options.backup} leaves {workers - options.backup} of {workers} workers to wait "
            "for; it takes bsp, and fewer than there are workers."
        )
    if options.tier not in ("worker", "host"):
        return f"{plan.exchange}: tier={options.tier}; it is worker or host."
    if options.patience <= 0:
        return f"{plan.exchange}: patience={options.patience} s lets nobody work; 60 is a good one."
    return None


RULES: tuple[Rule, ...] = (
    _workers_exist,
    _degrees_divide,
    _solo_is_alone,
    _schedule_fits,
    _replicas_divide,
    _models_are_whole,
    _compressor_fits,
    _quorum_fits,
    _server_options_fit,
)
