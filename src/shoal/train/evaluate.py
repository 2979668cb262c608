"""Loss and metrics over a whole data set, each sample once, whatever the number of workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from shoal.call import call_model
from shoal.data.batch import Batch, convert
from shoal.data.dataloader import LoaderParts, loader_parts
from shoal.data.loader import Loader
from shoal.data.source import Source, check_source, is_stream
from shoal.errors import ConfigError
from shoal.partition.block import BlockPartition
from shoal.torch_private import tree_map
from shoal.train.model.make import in_evaluation
from shoal.train.step_context import StepContext
from shoal.train.technique.loss import as_sum_and_count
from shoal.train.technique.metrics import Metric
from shoal.types import Evaluation


def describe(
    data: Source | DataLoader[Any], metrics: Mapping[str, Metric], weights: str | None = None
) -> str:
    """What is the same on every rank that calls it.

    >>> describe([1, 2, 3], {"acc": print})
    'run.evaluate of 3 samples, with acc'
    """
    held = data.dataset if isinstance(data, DataLoader) else data
    size = f" of {len(held)} samples" if hasattr(held, "__len__") else ""
    of = f" of weights={weights!r}" if weights else ""
    return f"run.evaluate{size}{', with ' if metrics else ''}{', '.join(metrics)}{of}"


def evaluate(
    parts: StepContext, data: Source | DataLoader[Any], metrics: Mapping[str, Metric], batch: int | None
) -> Evaluation:
    """Every rank calls it and gets the same answer."""
    parts.watch.check("before evaluate")
    # Buffers such as batch-norm statistics follow each rank's own data; rank 0's are the ones a checkpoint keeps.
    with parts.exchange.averaged(), parts.watch.lent(parts.mesh.data):
        return _evaluate(parts, data, metrics, batch)


def _evaluate(
    parts: StepContext, data: Source | DataLoader[Any], metrics: Mapping[str, Metric], batch: int | None
) -> Evaluation:
    world, model = parts.world, parts.model
    loader = _open(parts, data, batch)
    measures = {"loss": parts.loss, **metrics}
    sums = torch.zeros(len(measures), 2, dtype=torch.float64, device="cpu")
    try:
        with in_evaluation(model), torch.no_grad():
            for step in range(loader.steps_per_epoch):
                portion = loader.take(step)
                meets = parts.gather.meets(portion.samples)
                with parts.gather.meeting(not any(portion.counts)) if meets else nullcontext():
                    for mine, counts in zip(portion.batches, portion.counts, strict=True):
                        if mine is None:
                            continue
                        parts.presence.see(counts)
                        found = _measure(parts, mine, measures)
                        if counts:  # a filler takes part and counts nothing
                            sums += found
    finally:
        parts.presence.see(True)
    sums /= parts.mesh.tensor.size  # all of them have measured the same
    world.all_reduce(sums).wait()
    means = {
        name: total / count if count else math.nan
        for name, (total, count) in zip(measures, sums.tolist(), strict=True)
    }
    return Evaluation(means.pop("loss"), float(sums[0, 1]), means)


def _open(parts: StepContext, data: Source | DataLoader[Any], batch: int | None) -> Loader:
    """Every sample once, in order; of a DataLoader those that it would give, in its batches."""
    base = parts.loader.feed
    if isinstance(data, DataLoader):
        given = loader_parts(data, base.seed)
    else:
        given = LoaderParts(data, base.global_batch, collate=base.collate)
    source, batch = given.data, batch or given.batch
    check_source(source, batch if given.drop_last else 1, given.sampler is not None)
    if is_stream(source):
        raise ConfigError(
            f"evaluate takes data with len() and [i], and {type(source).__name__} is a stream; use a list."
        )
    feed = dataclasses.replace(
        base,
        data=source,
        global_batch=batch if given.drop_last else min(batch, len(source)),
        rank=parts.mesh.data.rank,
        size=parts.mesh.data.size,
        accumulate=1,
        shuffle=False,
        collate=given.collate,
        workers=given.workers,
        partition=BlockPartition(),
        columns={},
        sampler=given.sampler,
        drop_last=given.drop_last,
        pin_memory=given.pin_memory,
        worker_init=given.worker_init,
        augment=None,
    )
    return Loader(feed)


def _measure(parts: StepContext, batch: Batch, measures: Mapping[str, Metric]) -> torch.Tensor:
    rows = []
    with parts.precision.context(parts.world.device), (parts.split_loss or nullcontext)():
        if parts.pipeline is None:
            batch = convert(batch, parts.world.device, parts.precision.model)
            output = call_model(parts.model, parts.inputs(batch))
        else:
            measured = parts.pipeline.measure(batch)
            if measured is None:
                return torch.zeros(len(measures), 2, dtype=torch.float64, device="cpu")
            output, batch = measured
        for name, measure in measures.items():
            if name != "loss":  # only a loss knows what to do with logits that are cut
                output = tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, output)
            total, count = as_sum_and_count(measure(output, batch), batch)
            rows.append([float(total), count])
    return torch.tensor(rows, dtype=torch.float64, device="cpu")
