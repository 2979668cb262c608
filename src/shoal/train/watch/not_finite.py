"""A loss or gradient that is not finite: on which rank, with which samples, in which parameter it came up first.

Looked for only once it has happened, so that it may take as long as a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch

from shoal.data.batch import Batch
from shoal.data.loader import Loader
from shoal.errors import NonFiniteLoss
from shoal.train.model.sync_batchnorm import has_batchnorm
from shoal.train.passes import forward
from shoal.train.step_context import StepContext

SHOWN = 8
SKIPS_TOLD = 3
"""So many steps that are skipped are looked into; a run that skips more has been told enough."""


def not_finite(context: StepContext, step: int, what: str, advice: str) -> None:
    """Raise, or note what was found where such steps are skipped. Every rank calls it, unless losses are local."""
    if context.skip_nan:
        if context.skips < SKIPS_TOLD:
            context.skips += 1
            context.trouble = f"{what} and is skipped{found_in(context, step)}"
        return
    _raise(f"{what}{found_in(context, step)}; {advice}, or set on_nan='skip' to drop such steps.")


def _raise(sentence: str) -> NoReturn:
    raise NonFiniteLoss(sentence)


def found_in(context: StepContext, step: int) -> str:
    """As ": rank 2 has it first, with samples 3, 17, …". Collective where workers meet in every step."""
    mine = look(context, step)
    alone = context.exchange.work.loss_is_local or context.exchange.uses_servers
    rows = [mine] if alone else context.world.gather_values(mine)
    ranks = [context.world.rank] if alone else list(range(len(rows)))
    return sentence(dict(zip(ranks, rows, strict=True)))


def sentence(rows: Mapping[int, Mapping[str, Any]]) -> str:
    """What the ranks have found, in words.

    >>> rows = {0: {"loss": False}, 1: {"loss": True, "samples": [3, 17], "bad": [17], "gradient": "last.bias"}}
    >>> sentence(rows)
    ': it comes from rank 1, with samples 3, 17; sample 17 holds numbers that are not finite'
    """
    for rank, row in rows.items():
        if row.get("parameter"):
            everywhere = " on every rank" if all(other.get("parameter") for other in rows.values()) else ""
            where = everywhere or f" on rank {rank}"
            return f": parameter {row['parameter']} is not finite{where}, so that the update before it went wrong"
    guilty = [rank for rank, row in rows.items() if row.get("loss") or row.get("bad") or row.get("gradient")]
    if not guilty:
        return (
            ": no rank's own numbers are the cause, so that their sum is too large" if len(rows) > 1 else ""
        )
    rank = guilty[0]
    row = rows[rank]
    said = f": it comes from rank {rank}"
    said += f" (and {len(guilty) - 1} more)" if guilty[1:] else ""
    if row.get("samples"):
        said += f", with samples {_listed(row['samples'])}"
    if row.get("bad"):
        said += f"; sample {_listed(row['bad'])} holds numbers that are not finite"
    elif row.get("gradient"):
        said += f"; first in the gradient of {row['gradient']}"
    return said


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (", …" if len(numbers) > SHOWN else "")


def look(context: StepContext, step: int) -> dict[str, object]:
    """What this rank knows of it."""
    portion, loss = context.portion, context.tally.total
    found: dict[str, object] = {"loss": not math.isfinite(loss), "parameter": _first_parameter(context)}
    if portion is None or found["parameter"]:
        return found
    ids: list[list[int]] = []
    if isinstance(context.loader, Loader):
        with suppress(IndexError, ValueError, KeyError):
            ids = context.loader.samples_of(step)
    found["samples"] = [number for some in ids for number in some]
    bad = [list(_bad_rows(batch)) for batch in portion.batches if batch is not None]
    found["bad"] = [
        some[row] for some, rows in zip(ids, bad, strict=False) for row in rows if row < len(some)
    ]
    if not found["bad"] and not context.skip_nan:  # a run that goes on is as if nobody had looked
        found["gradient"] = _first_gradient(context, step)
    return found


def _first_parameter(context: StepContext) -> str:
    for shard in context.exchange.parameter_shards():
        if not bool(torch.isfinite(shard.tensor).all()):
            return shard.name
    return ""


def _tensors(batch: object) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _bad_rows(batch: Batch) -> list[int]:
    """Samples of a micro-batch with numbers that are not finite."""
    rows: set[int] = set()
    for tensor in _tensors(batch):
        if tensor.dim() and tensor.is_floating_point():
            bad = ~torch.isfinite(tensor.reshape(len(tensor), -1)).all(1)
            rows.update(bad.nonzero().flatten().tolist())
    return sorted(rows)


def _first_gradient(context: StepContext, step: int) -> str:
    """The first parameter whose gradient of this rank's own samples is not finite; the step is computed once more.

    The script's own code runs again for it and may count its calls, so only a run that ends does this. Only where a
    worker has the whole model and computes alone: nobody else would take part. Sums of all ranks have long replaced the
    gradients themselves.
    """
    exchange, portion = context.exchange, context.portion
    whole = context.mesh.model.size == 1 and not exchange.cuts_parameters and not exchange.tables.names
    if portion is None or not whole or context.gather.used or has_batchnorm(context.model):
        return ""
    named = {name: p for name, p in context.model.named_parameters() if p.requires_grad}
    for number, batch in enumerate(portion.batches):
        if batch is None or not portion.counts[number]:
            continue
        context.streams.begin(step, portion.first + number)
        total, _ = forward(context, batch)
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                return name
    return ""
