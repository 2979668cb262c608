"""What else to measure of each training step, `metrics=`: sums and counts, over all micro-batches and workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from shoal.data.batch import Batch
from shoal.errors import ConfigError
from shoal.torch_private import tree_map
from shoal.train.technique.loss import Loss, as_sum_and_count
from shoal.world.mesh import Mesh

Metric = Callable[[Any, Batch], Any]
"""(output, batch) -> (sum, count), or a scalar mean over the batch."""


class Present(Protocol):
    """Whether the present micro-batch has samples of this worker's own."""

    counts: bool


class TrainingMetrics:
    """Measures what the model returns for each micro-batch, beside the loss."""

    def __init__(self, metrics: Mapping[str, Metric], mesh: Mesh, local: bool) -> None:
        """`local`: each worker trains by itself, and its metrics are those of its own samples, as its loss is."""
        check_metrics(metrics)
        self._metrics = dict(metrics)
        self._group = mesh.model if local else mesh.world
        self._copies = mesh.tensor.size
        """So many workers measure the same samples."""
        self._sums = torch.zeros(len(metrics), 2, dtype=torch.float64, device="cpu")

    def watch(self, loss: Loss, presence: Present) -> Loss:
        """The same loss, which also measures."""
        if not self._metrics:
            return loss

        def measured(output: object, batch: Batch) -> Any:
            if torch.is_grad_enabled():  # an evaluation is none of a training step's
                self._measure(output, batch, presence.counts)
            return loss(output, batch)

        return measured

    def take(self) -> dict[str, float]:
        """The means of the step that is over. Collective."""
        if not self._metrics:
            return {}
        sums = self._sums / self._copies
        self._sums.zero_()
        self._group.all_reduce(sums).wait()
        return {
            name: total / count if count else math.nan
            for name, (total, count) in zip(self._metrics, sums.tolist(), strict=True)
        }

    @torch.no_grad()
    def _measure(self, output: object, batch: Batch, counts: bool) -> None:
        """A filler counts nothing; but a metric that gathers rows is called by every worker."""
        if self._copies > 1:
            output = tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, output)
        for row, metric in zip(self._sums, self._metrics.values(), strict=True):
            total, count = as_sum_and_count(metric(output, batch), batch, "a metric")
            if counts:
                row += torch.tensor([float(total), count], dtype=torch.float64, device="cpu")


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Refuse what cannot be measured, or not be told from the loss."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f'metrics= is a {type(metrics).__name__}; give a dict such as {{"acc": function}}, (output, batch) -> '
            "(sum, count)."
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not callable(metric) or name == "loss":
            raise ConfigError(
                f"metrics=: {name!r} is a {type(metric).__name__}; give names other than 'loss', and functions "
                "(output, batch) -> (sum, count)."
            )
