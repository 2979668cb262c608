"""Does collate= mix samples? Workers and micro-batches collate their own, so each row must be of its own samples only.

A run looks once, in its first step: what collate= makes of a few samples must be what it makes of their two halves,
one after the other. Only rows of one shape are compared: samples padded to the longest are others of another length.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from shoal.data.batch import Batch, Collate
from shoal.data.loader import Loader
from shoal.data.source import fetch_samples
from shoal.data.stream import FEW, StreamLoader
from shoal.functions import copy_of
from shoal.torch_private import tree_leaves

_ROUNDING = 1e-6
"""Relative to the largest: what collate= computes of more rows at once another kernel may compute."""


def look_at_collate(loader: Loader | StreamLoader, step: int) -> str:
    """What a collate= makes of samples that depends on which others are there, in a sentence; empty if nothing.

    Samples are read again, and copies of them are collated by a copy of the function. Nothing is claimed where that
    fails. The caller sees to the global generators.
    """
    feed = loader.feed
    if feed.collate is None or feed.parts == 1:
        return ""
    try:
        samples = _few(loader, step)
        return mixes(copy_of(feed.collate, nn.Module()), samples) if len(samples) > 1 else ""
    except Exception:  # samples that can be read once only, or that cannot be copied, have said nothing
        return ""


def _few(loader: Loader | StreamLoader, step: int) -> list[object]:
    if isinstance(loader, StreamLoader):
        return loader.first or []
    ids = [number for some in loader.samples_of(step) for number in some][:FEW]
    return fetch_samples(
        loader.feed.data, ids if len(ids) > 3 else list(range(min(4, len(loader.feed.data))))
    )


def mixes(collate: Collate, samples: Sequence[object]) -> str:
    """What is wrong with a collate, in a sentence.

    >>> samples = [torch.tensor([1.0]), torch.tensor([3.0])]
    >>> mixes(torch.stack, samples)
    ''
    >>> mixes(lambda rows: torch.stack(rows) - torch.stack(rows).mean(0), samples)[:56]
    'shoal: collate= makes other rows of 2 samples than of th'
    """
    n, half = len(samples), _half(len(samples))
    before = _standing()
    whole = collate(copy.deepcopy(list(samples)))
    if _standing() != before:
        return (
            "shoal: collate= draws random numbers, once for all samples of a micro-batch, and mixes no others than "
            "these, if it mixes any: numbers and partners are others with another product of workers and accumulate. "
            "What data[i] draws is the same at any number of workers."
        )
    first, second = collate(copy.deepcopy(list(samples[:half]))), collate(copy.deepcopy(list(samples[half:])))
    if _same(whole, first, second):
        return ""
    return (
        f"shoal: collate= makes other rows of {n} samples than of the same in two halves: it mixes samples of a batch, "
        "and each worker and micro-batch collates its own only, so that the numbers depend on how many there are. Mix "
        "in the data set, where data[i] may read other samples, or in the model with run.gather."
    )


def _half(n: int) -> int:
    """An even number where there is one, for what makes pairs of neighbours."""
    return n // 2 - (n // 2) % 2 or n // 2


def _same(whole: Batch, first: Batch, second: Batch) -> bool:
    """Whether the rows of two batches are those of one, as far as they can be compared."""
    trees = [tree_leaves(tree) for tree in (whole, first, second)]
    if len({len(leaves) for leaves in trees}) > 1:
        return True
    for all_, *parts in zip(*trees, strict=True):
        if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in (all_, *parts)):
            continue
        if len({leaf.shape[1:] for leaf in (all_, *parts)}) > 1 or len(all_) != sum(map(len, parts)):
            continue
        if all_.numel() and not _same_rows(all_, *parts):
            return False
    return True


def _same_rows(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> bool:
    both = torch.cat([first, second])
    if torch.equal(whole, both):
        return True
    if whole.is_floating_point() or whole.is_complex():
        size = _ROUNDING * float(whole.abs().nan_to_num().max())
        return torch.allclose(whole, both, rtol=0.0, atol=size, equal_nan=True)
    # Numbers of nodes or samples go on where the other half ended.
    rest = (whole - both)[len(first) :] if whole.dtype is not torch.bool else whole
    return torch.equal(whole[: len(first)], first) and bool((rest == rest.flatten()[0]).all())


def _standing() -> tuple[object, ...]:
    words: object = np.random.get_state(legacy=False)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(words)
