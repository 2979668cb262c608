"""Augmentations one after the other: `affine(10) & flip & mixup(0.2, classes=10)`.

Functions of the user's see single samples, before they are collated; the table's choices see the rows of a batch. A
mixture needs samples of the whole global batch: a worker fetches the partners of its own samples too, and augments
them as their own worker does, so that the mixed sample is the same at any number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.data.augment.base import Augmentation, Mixture, check_rows
from shoal.data.augment.sample_draws import SampleDraws, Words, per_row
from shoal.data.batch import Batch
from shoal.errors import ConfigError
from shoal.partition.cuts import Ids

SampleFunction = Callable[[Any, np.random.Generator], Any]
"""(sample, rng) -> sample; `rng` is one of numpy's, keyed by seed, epoch and sample."""
Augment = str | SampleFunction | Sequence[str | SampleFunction]
"""What a user asks for."""

Place = str | int | None
"""Key or number of a part of a batch; None: the batch itself."""

_INPUTS = ("inputs", "input_ids", "pixel_values", "input_values")
_LABELS = ("labels", "label", "targets")


@dataclass(frozen=True)
class Link:
    """One augmentation of a chain."""

    made: Augmentation | Mixture
    name: str
    number: int
    """How often the chain has had this name before: what a sample draws does not depend on its place in the chain."""

    def draws(self, keys: Words) -> SampleDraws:
        """What samples with these keys draw here."""
        return SampleDraws(keys, self.name, self.number)

    def place(self, batch: Batch) -> Place:
        """The part of the batch that it changes."""
        return place_of(batch, self.made.field, _INPUTS, 0, self.name)


@dataclass(frozen=True)
class Chain:
    """Functions of samples, then links."""

    functions: tuple[SampleFunction, ...]
    links: tuple[Link, ...]

    @staticmethod
    def of(functions: Sequence[SampleFunction], made: Sequence[tuple[str, Augmentation | Mixture]]) -> Chain:
        """A chain of these; refuses two mixtures."""
        seen: Counter[str] = Counter()
        links = []
        for name, one in made:
            links.append(Link(one, name, seen[name]))
            seen[name] += 1
        mixtures = [link.name for link in links if isinstance(link.made, Mixture)]
        if len(mixtures) > 1:
            raise ConfigError(
                f"augment: {' and '.join(mixtures)} both mix samples, and the second would need partners of partners; "
                "keep one of them."
            )
        return Chain(tuple(functions), tuple(links))

    @property
    def mixes(self) -> bool:
        """Whether samples have partners."""
        return any(isinstance(link.made, Mixture) for link in self.links)

    def sample(self, sample: object, key: int) -> object:
        """One sample through the user's functions."""
        keys = np.array([key], dtype=np.uint64)
        for number, function in enumerate(self.functions):
            rng = next(SampleDraws(keys, "function", number).generators())
            sample = function(sample, rng)
        return sample

    def batch(self, batch: Batch, keys: Words, partners: Ids | None = None) -> Batch:
        """A batch with a row for each key through all links.

        `partners`: in which row each of the first ones' partner is; only those first rows come back.
        """
        for link in self.links:
            if isinstance(link.made, Augmentation):
                place = link.place(batch)
                changed = link.made.apply(part(batch, place, link.name), link.draws(keys))
                batch = with_part(batch, place, changed)
            elif partners is not None:
                batch = _mixed(link, link.made, batch, keys, partners)
                keys = keys[: len(partners)]
        return batch


def _mixed(link: Link, mixture: Mixture, batch: Batch, keys: Words, partners: Ids) -> Batch:
    own = len(partners)
    place = link.place(batch)
    where = place_of(batch, mixture.labels, _LABELS, 1, link.name)
    rows, labels = part(batch, place, link.name), part(batch, where, link.name)
    check_rows(mixture, rows)
    shares = _shares(labels, mixture.classes, link.name)
    small = rows_in(batch, own, len(keys))
    others = torch.from_numpy(partners)
    mixed, kept = mixture.mix(rows[:own], rows[others], link.draws(keys[:own]))
    weight = per_row(kept, shares)
    small = with_part(small, place, mixed)
    return with_part(small, where, shares[:own] * weight + shares[others] * (1 - weight))


def _shares(labels: torch.Tensor, classes: int, who: str) -> torch.Tensor:
    """Labels that can be blended: numbers, or a share for each class."""
    if labels.is_floating_point():
        return labels
    if classes < 2:
        raise ConfigError(
            f"augment: {who} blends labels, and these are numbers of classes; say how many there are, as in "
            f"{who}(classes=10). Each label becomes a share for each class, which cross_entropy takes."
        )
    if labels.dim() != 1 or (labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
        low, high = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
        raise ConfigError(
            f"augment: {who} has classes={classes}, and labels of shape {list(labels.shape)} are {low} to {high}; give "
            "one class for each sample, from 0 to classes - 1."
        )
    return torch.nn.functional.one_hot(labels.long(), classes).to(torch.get_default_dtype())


def place_of(batch: Batch, name: str, defaults: tuple[str, ...], number: int, who: str) -> Place:
    """Where in a batch the part of that name is; without a name, the usual place.

    >>> place_of({"inputs": 1, "labels": 2}, "", ("inputs", "input_ids"), 0, "flip")
    'inputs'
    >>> place_of((1, 2), "1", (), 0, "flip")
    1
    """
    if isinstance(batch, Mapping):
        wanted = (name,) if name else defaults
        found = next((key for key in wanted if key in batch), None)
        if found is None:
            raise ConfigError(
                f"augment: {who} looks for {' or '.join(wanted)} in the batch, which has {', '.join(map(str, batch))}; "
                f"name the part, as in {who}(field={next(iter(batch), 'inputs')})."
            )
        return found
    if isinstance(batch, tuple | list):
        place = int(name) if name.isdigit() else number if not name else -1
        if not 0 <= place < len(batch):
            raise ConfigError(
                f"augment: {who} looks for part {name or number} of the batch, which has {len(batch)} parts, numbered "
                "from 0."
            )
        return place
    if name or number:
        raise ConfigError(
            f"augment: {who} looks for part {name or number} of the batch, which is one {type(batch).__name__}; let "
            "data[i] return a tuple or a dict."
        )
    return None


def part(batch: Batch, place: Place, who: str) -> torch.Tensor:
    """The tensor there."""
    found = batch if place is None else batch[place]
    if not isinstance(found, torch.Tensor) or found.dim() == 0:
        raise ConfigError(
            f"augment: {who} changes tensors, and this part of the batch is a {type(found).__name__}; let data[i] "
            "return tensors or arrays, or give collate=."
        )
    return found


def with_part(batch: Batch, place: Place, rows: torch.Tensor) -> Batch:
    """The batch with another tensor there; the one given stays as it is."""
    if place is None:
        return rows
    if isinstance(batch, dict):
        return {**batch, place: rows}
    if isinstance(batch, Mapping):  # such as a tokenizer's, which keeps its type
        return type(batch)({**batch, place: rows})  # type: ignore[call-arg]
    parts = [rows if number == place else value for number, value in enumerate(batch)]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*parts)
    return type(batch)(parts)


def rows_in(batch: Batch, first: int, of: int) -> Batch:
    """The first rows of everything in a batch of so many samples."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0 or len(batch) != of:
            shape = list(batch.shape)
            raise ConfigError(
                f"augment: mixing takes rows of a batch, and collate= gave a tensor of shape {shape} for {of} "
                "samples; let each tensor have a row for each sample."
            )
        return batch[:first]
    if isinstance(batch, dict):
        return {key: rows_in(value, first, of) for key, value in batch.items()}
    if isinstance(batch, Mapping):
        return type(batch)({key: rows_in(value, first, of) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(rows_in(value, first, of) for value in batch))
    if isinstance(batch, list) and len(batch) == of and not any(isinstance(v, torch.Tensor) for v in batch):
        return batch[:first]  # texts, as torch collates them
    if isinstance(batch, tuple | list):
        return type(batch)(rows_in(value, first, of) for value in batch)
    return batch
