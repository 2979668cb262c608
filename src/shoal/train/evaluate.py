"""Loss and metrics over a whole data set, each sample once, whatever the number of workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from shoal.data.batch import Batch, convert
from shoal.data.loader import Loader
from shoal.data.source import Source, check_source, is_stream
from shoal.errors import ConfigError
from shoal.partition.block import Block
from shoal.train.loss import as_sum_and_count
from shoal.train.parts import Parts
from shoal.types import Evaluation

Metric = Callable[[Any, Batch], Any]
"""(output, batch) -> (sum, count), or a scalar mean over the batch."""


def evaluate(parts: Parts, data: Source, metrics: Mapping[str, Metric], batch: int) -> Evaluation:
    """Every rank calls it and gets the same answer."""
    with parts.exchange.shown():
        return _evaluate(parts, data, metrics, batch)


def _evaluate(parts: Parts, data: Source, metrics: Mapping[str, Metric], batch: int) -> Evaluation:
    world, model = parts.world, parts.model
    data_world = parts.mesh.data
    check_source(data, 1)
    if is_stream(data):
        raise ConfigError(
            f"evaluate takes data with len() and [i], and {type(data).__name__} is a stream; use a list."
        )
    batch = min(batch, len(data))
    feed = dataclasses.replace(parts.loader.feed, data=data, global_batch=batch, accumulate=1)
    feed = dataclasses.replace(feed, rank=data_world.rank, size=data_world.size)
    loader = Loader(dataclasses.replace(feed, shuffle=False, workers=0, partition=Block(), columns={}))
    measures = {"loss": parts.loss, **metrics}
    sums = torch.zeros(len(measures), 2, dtype=torch.float64)
    was_training = model.training
    # Buffers such as batch-norm statistics follow each rank's own data; rank 0's are the ones a checkpoint keeps.
    for handle in [data_world.broadcast(b) for b in model.buffers() if b.numel()]:
        handle.wait()
    model.eval()
    try:
        with torch.no_grad():
            for step in range(loader.steps_per_epoch):
                portion = loader.take(step)
                for mine, counts in zip(portion.batches, portion.counts, strict=True):
                    if mine is None:
                        continue
                    found = _measure(parts, mine, measures)
                    if counts:  # a filler takes part and counts nothing
                        sums += found
    finally:
        model.train(was_training)
    sums /= parts.mesh.tensor.size  # all of them have measured the same
    world.all_reduce(sums).wait()
    means = {
        name: total / count if count else math.nan
        for name, (total, count) in zip(measures, sums.tolist(), strict=True)
    }
    return Evaluation(means.pop("loss"), float(sums[0, 1]), means)


def _measure(parts: Parts, batch: Batch, measures: Mapping[str, Metric]) -> torch.Tensor:
    rows = []
    with parts.precision.context(parts.world.device), (parts.split_loss or nullcontext)():
        if parts.pipeline is None:
            batch = convert(batch, parts.world.device, parts.precision.model)
            output = parts.model(parts.inputs(batch))
        else:
            measured = parts.pipeline.measure(batch)
            if measured is None:
                return torch.zeros(len(measures), 2, dtype=torch.float64)
            output, batch = measured
        for name, measure in measures.items():
            if name != "loss":  # only a loss knows what to do with logits that are cut
                output = tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, output)
            total, count = as_sum_and_count(measure(output, batch), batch)
            rows.append([float(total), count])
    return torch.tensor(rows, dtype=torch.float64)
