"""A model that returns its own loss, as those of Hugging Face do: which number its mean was divided by.

A mean alone cannot be shared: parts of a batch with more labels weigh more. So before the first step the model is
asked. It runs on a few samples with some of their labels masked, and what it returns must be additive with one of
these counts: the loss over two halves of the labels, each times its count, is the loss over all of them; and so for two
halves of the samples. A loss of several parts, divided by different numbers, fits none and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.batch import Batch, length
from shoal.errors import ConfigError

IGNORED = -100
"""The label that torch's losses leave out."""

_ROUNDING = 20
"""Units in the last place by which sums may differ that are equal."""


def shifted_labels(labels: Tensor) -> Tensor:
    """Labels that count, but not the first of a row: no token comes before it that could foretell it."""
    return (labels[..., 1:] != IGNORED).sum()


def all_labels(labels: Tensor) -> Tensor:
    """Labels that count."""
    return (labels != IGNORED).sum()


def rows(labels: Tensor) -> Tensor:
    """Samples."""
    return torch.tensor(labels.shape[0], device="cpu")


Count = Callable[[Tensor], Tensor]
Forward = Callable[[Batch], object]
"""Batch -> what the model returns."""


def as_returned(output: object, batch: Batch) -> tuple[Tensor, float]:
    """The loss as it comes: for a trial, which asks of what kind it is and not how large."""
    del batch
    return loss_of(output), 1.0


class OwnLoss:
    """(output, batch) -> (sum, count) from `output.loss`, once `settle` has found out what the count is."""

    def __init__(self) -> None:
        self._count: Count | None = None

    def __call__(self, output: object, batch: Batch) -> tuple[Tensor, Tensor]:
        mean, labels = loss_of(output), labels_of(batch)
        assert self._count is not None
        count = self._count(labels)
        if count == 0:  # the mean of nothing is no number, and would spoil the sum
            return _nothing(output, mean), count
        return mean * count, count

    @property
    def settled(self) -> bool:
        """Whether the count is known."""
        return self._count is not None

    def settle(self, model: nn.Module, forward: Forward, batch: Batch) -> None:
        """Find the count on a batch of a few samples. Makes the same forward passes on every rank."""
        labels = labels_of(batch)
        with _calm(model):
            output = forward(batch)
            _check_parts(model, output)
            means = [loss_of(output)]
            if labels.is_floating_point():
                candidates: tuple[Count, ...] = (rows,)
            else:
                batch = _apart_from_labels(model, batch)
                candidates = (all_labels if _first_counts(forward, batch) else shifted_labels, rows)
            misses = dict.fromkeys(candidates, 0.0)
            for probe in _probes(batch, labels):
                means = [loss_of(forward(one)) for one in probe]
                for count in candidates:
                    misses[count] = max(misses[count], _miss(means, [count(labels_of(one)) for one in probe]))
        best = min(misses, key=misses.__getitem__)
        widths = {p.dtype for p in model.parameters() if p.is_floating_point()} | {means[0].dtype}
        if not misses[best] <= _ROUNDING * max(torch.finfo(width).eps for width in widths):
            raise ConfigError(
                f"{type(model).__name__} returns a loss that is no mean over its labels or samples (over "
                f"{_words(best)} it misses by {misses[best]:.1g} of it): how parts of a batch add up is not known; "
                "give loss= as (output, batch) -> (sum, count)."
            )
        self._count = best


def loss_of(output: object) -> Tensor:
    """The loss that a model returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    what = f"a loss of shape {list(loss.shape)}" if isinstance(loss, Tensor) else "none as output.loss"
    raise ConfigError(
        f"loss= is left out, so the model has to return its own, and {type(output).__name__} has {what}; give loss= as "
        "(output, batch) -> (sum, count)."
    )


def labels_of(batch: Batch) -> Tensor:
    """The labels of a batch that a model computes its own loss from."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor) and labels.dim() > 0:
        return labels
    raise ConfigError(
        f"loss= is left out, and the batch, a {type(batch).__name__}, has no tensor 'labels' to count; let data= give "
        "dicts with 'labels', or give loss= as (output, batch) -> (sum, count)."
    )


def _nothing(output: object, mean: Tensor) -> Tensor:
    """Zero, from the model's parameters."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return (logits.float() * 0.0).sum() if isinstance(logits, Tensor) else torch.nan_to_num(mean) * 0.0


def _check_parts(model: nn.Module, output: object) -> None:
    """Refuse a loss to which something is added that does not depend on labels, such as a router's: it may be tiny."""
    loss_of(output)
    names = list(output) if isinstance(output, Mapping) else list(vars(output))
    parts = [name for name in names if str(name).endswith("_loss")]
    if parts:
        raise ConfigError(
            f"{type(model).__name__} returns {', '.join(map(str, parts))} beside its loss, so that is a sum of parts, "
            "each divided in its own way; give loss= as (output, batch) -> (sum, count)."
        )


def _apart_from_labels(model: nn.Module, batch: Batch) -> Batch:
    """A decoder's inputs, where the model would make them of the labels, which are about to change."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is None or "decoder_input_ids" in batch:
        return batch
    return {**batch, "decoder_input_ids": make(labels=labels_of(batch))}


def _known(labels: Tensor) -> Tensor:
    """Labels of which none is left out."""
    return torch.where(labels == IGNORED, torch.zeros_like(labels), labels)


def _first_counts(forward: Forward, batch: Batch) -> bool:
    """Whether the loss depends on the first label of a row at all."""
    known = _known(labels_of(batch))
    if known.dim() < 2:
        return True
    other = known.clone()
    other[..., 0] = (known[..., 0] == 0).to(known.dtype)
    first, second = (loss_of(forward(_with(batch, labels))) for labels in (known, other))
    return not torch.equal(first, second)


def _probes(batch: Batch, labels: Tensor) -> Iterator[tuple[Batch, Batch, Batch]]:
    """Two parts and the whole: of the labels, with and without firsts of rows; and of the samples."""
    if not labels.is_floating_point():
        known = _known(labels)
        place = torch.arange(labels.numel(), device=labels.device).reshape(labels.shape)
        for kept in (place % 3 == 0, place % labels.shape[-1] == 0 if labels.dim() > 1 else place == 0):
            one = torch.where(kept, known, IGNORED)
            if labels.dim() > 1:
                one[..., -1] = known[..., -1]  # no part may be without any label that counts
            other = torch.where(one == IGNORED, known, IGNORED)
            if all_labels(other):
                yield _with(batch, one), _with(batch, other), _with(batch, known)
    samples = length(batch)
    if samples > 1:
        cut = (samples + 2) // 3
        yield _rows(batch, 0, cut, samples), _rows(batch, cut, samples, samples), batch


def _with(batch: Batch, labels: Tensor) -> Batch:
    return {**batch, "labels": labels}


def _rows(batch: Batch, start: int, stop: int, samples: int) -> Batch:
    def part(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == samples
        return value[start:stop] if whole else value

    return {name: part(value) for name, value in batch.items()}


def _miss(means: Sequence[Tensor], counts: Sequence[Tensor]) -> float:
    """How far the parts are from adding up to the whole, relative to it. A part without labels adds nothing."""
    first, second, whole = (
        float(mean) * float(count) if count else 0.0 for mean, count in zip(means, counts, strict=True)
    )
    return abs(first + second - whole) / abs(whole) if whole else abs(first + second)


def _words(count: Count) -> str:
    words: dict[Count, str] = {
        shifted_labels: "labels but the first of each row",
        all_labels: "labels",
        rows: "samples",
    }
    return words[count]


@contextmanager
def _calm(model: nn.Module) -> Iterator[None]:
    """Passes that leave no trace: no gradients, no dropout, no statistics, no random numbers used up."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
