"""Logits of a student and a teacher, row by row, and how much each row counts in the user's own loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from shoal.data.batch import Batch, length
from shoal.errors import ConfigError

_LABELS = ("labels", "label", "targets")


def logits_of(output: object, whose: str) -> torch.Tensor:
    """The logits in what a model returned: a tensor, or `.logits`, "logits" or the first entry of what it is.

    >>> logits_of({"logits": torch.zeros(2, 3)}, "the student").shape
    torch.Size([2, 3])
    """
    found = getattr(output, "logits", None)
    if found is None:
        found = output.get("logits") if isinstance(output, Mapping) else output
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if isinstance(found, DTensor):
        raise ConfigError(
            f"distil: the logits of {whose} are cut over the tensor axis, and their softmax needs them whole; leave "
            "loss=true out of tpN."
        )
    if not isinstance(found, torch.Tensor) or found.dim() < 2 or not found.is_floating_point():
        raise ConfigError(
            f"distil: {whose} returned a {type(output).__name__} without logits; let it return a tensor of shape "
            "... × classes, or a dict or an object that has one as logits."
        )
    return found


@dataclass(frozen=True)
class CountedRows:
    """Which rows of logits count, and how much each."""

    counts: torch.Tensor
    """By row, in the leading shape of the logits: 1 or 0."""
    weight: float
    """What a row that counts is worth in the count of the user's loss."""

    def total(self, by_row: torch.Tensor) -> torch.Tensor:
        """The sum over rows that count, as the user's loss sums."""
        return (by_row * self.counts).sum() * self.weight


def counted_rows(logits: torch.Tensor, batch: Batch, count: float, ignore: int) -> CountedRows:
    """How rows are to be weighed so that the sum over workers and micro-batches is right.

    The loss is divided by the user's count in the end. If he counts rows, each row of the teacher's is worth one; if
    he counts samples, all rows of a sample together are.
    """
    counts = torch.ones(logits.shape[:-1], dtype=logits.dtype, device=logits.device)
    labels = _labels(batch, logits)
    if labels is not None:
        counts = (labels != ignore).to(logits.dtype)
    rows = float(counts.sum())
    if rows == count:
        return CountedRows(counts, 1.0)
    samples = length(batch)
    if samples == count and logits.shape[0] == samples and rows == counts.numel():
        return CountedRows(counts, samples / rows)
    raise ConfigError(
        f"distil: loss= counts {count:g}, and {rows:g} of {counts.numel()} rows of logits count here, in {samples} "
        "samples: the two cannot be weighed alike under every split of the batch. Let loss= return (sum, count) over "
        f"the same rows; labels of {ignore} leave a row out (ignore=)."
    )


def _labels(batch: Batch, logits: torch.Tensor) -> torch.Tensor | None:
    """Labels by row, if the batch has such."""
    found: object = None
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in _LABELS if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        found = batch[1]
    fits = isinstance(found, torch.Tensor) and found.shape == logits.shape[:-1]
    return found if isinstance(found, torch.Tensor) and fits and not found.is_floating_point() else None


def divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(teacher ‖ student) of softened predictions by row, × temperature² so that gradients keep their size."""
    own = F.log_softmax(student / temperature, dim=-1)
    theirs = F.log_softmax(teacher.to(student.dtype) / temperature, dim=-1)
    return F.kl_div(own, theirs, reduction="none", log_target=True).sum(-1) * temperature**2
